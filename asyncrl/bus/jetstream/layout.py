"""Maps topics to JetStream: names, subjects, and the configuration of every stream and consumer. Pure.

topic       stream                     subject                              kept
work        asyncrl-RUN-TOPIC          asyncrl.RUN.TOPIC.KEY                until acked; at most Topic.most_messages
log         asyncrl-RUN-TOPIC          asyncrl.RUN.TOPIC.KEY                until trimmed or too old; max_log_bytes
state       KV_asyncrl-RUN-state       $KV.asyncrl-RUN-state.TOPIC.KEY      the last message of each key
state, TTL  KV_asyncrl-RUN-TOPIC       $KV.asyncrl-RUN-TOPIC.TOPIC.KEY      the last of each key, seconds_to_live
objects     OBJ_asyncrl-RUN-weights    $O.asyncrl-RUN-weights.>             until removed (objects.py)

State streams are key-value buckets for the `nats kv` command. The key a/b is a.b in its subject, so all keys under a/
can be queried and permitted together. A work or log topic refuses a key that it holds (one message per subject).
It also refuses a key that it held in the last ten minutes (Nats-Msg-Id). All workers share the durable consumer
``workers``, because a work-queue stream allows only one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.bus.port import DUPLICATE_SECONDS
from asyncrl.errors import BusError
from asyncrl.messages.topics import Service, Topic

HEADER_BYTES: Final = 1024
"""Room for headers in the server's max_payload."""

REMOVED: Final = {"KV-Operation": "PURGE"}
"""Header of a message that marks its key as removed. Needed because the stream keeps the last message of each key."""
_MARKER: Final = "Nats-Marker-Reason"
"""Header of the message that the server puts in place of an expired one."""
GONE_SOON: Final = {"Nats-TTL": "1s"}
"""Lets a removal marker expire after a second, in streams with expiry. Before nats-server 2.11 it lives as long as the
stream's other messages."""
WORKERS: Final = "workers"
_REPUBLISHED: Final = "asyncrl-stored."
"""Prefix of the subjects on which streams announce what they have stored."""

_MAX_KEY_CHARACTERS: Final = 256
_NANOSECONDS: Final = 10**9
_MANY_WAITING: Final = 16_384
"""Maximum of pull requests waiting at the shared consumer: one per rollout worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    run: str
    max_prompts: int
    max_log_bytes: int
    ack_seconds: float
    storage: Literal["file", "memory"]
    replicas: int = 1

    def service(self, service: Service[Any, Any]) -> str:
        """Subject of a service's requests. No stream stores them."""
        return f"asyncrl-ask.{self.run}.{service.name}" + (f".{token(service.key)}" if service.key else "")

    def freed(self, lease: str, *, role: str) -> str:
        """Subject that announces a released lease. No stream stores it."""
        return f"asyncrl-freed.{self.run}.{role}.{token(lease)}"

    def stream(self, topic: Topic[Any]) -> str:
        return f"KV_{self._bucket(topic)}" if topic.kind == "state" else f"asyncrl-{self.run}-{topic.name}"

    def prefix(self, topic: Topic[Any]) -> str:
        """Part of a subject before the key."""
        if topic.kind == "state":
            return f"$KV.{self._bucket(topic)}.{topic.name}."
        return f"asyncrl.{self.run}.{topic.name}."

    def subject(self, topic: Topic[Any], key: str) -> str:
        return self.prefix(topic) + ".".join(map(token, key.split("/")))

    def republish_subject(self, topic: Topic[Any], key: str = "") -> str:
        """Subject on which the topic's stream republishes the messages of ``key``, or of all keys. No stream stores
        it."""
        return _REPUBLISHED + (self.subject(topic, key) if key or topic.kind == "state" else self.prefix(topic) + ">")

    def under(self, topic: Topic[Any], under: str) -> str:
        """Subjects of all keys that begin with ``under``, which is empty or ends in "/", as in Bus.states."""
        parts = under.split("/")[:-1]
        return self.prefix(topic) + ".".join([*("*" if part == "*" else token(part) for part in parts), ">"])

    def key(self, topic: Topic[Any], subject: str) -> str:
        return "/".join(map(key_of, subject.removeprefix(self.prefix(topic)).split(".")))

    def _bucket(self, topic: Topic[Any]) -> str:
        return f"asyncrl-{self.run}-{topic.name if topic.seconds_to_live else 'state'}"

    def stream_config(self, topic: Topic[Any]) -> dict[str, Any]:
        max_age = int(topic.seconds_to_live * _NANOSECONDS)
        duplicates = int(DUPLICATE_SECONDS * _NANOSECONDS)
        config = {
            "name": self.stream(topic),
            "storage": self.storage,
            "num_replicas": self.replicas,
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_age": max_age,
            "max_msgs_per_subject": 1,
            "duplicate_window": min(duplicates, max_age) if max_age else duplicates,
            "discard": "new",
        }
        if topic.kind == "state":
            return config | {
                "subjects": [f"$KV.{self._bucket(topic)}.>"],
                "republish": {"src": ">", "dest": f"{_REPUBLISHED}>"},
                "retention": "limits",
                "allow_direct": True,
                "allow_rollup_hdrs": False,  # one message could remove all others of the stream
                "allow_msg_ttl": bool(topic.seconds_to_live),
                "deny_delete": True,
            }
        config |= {"subjects": [self.prefix(topic) + ">"], "discard_new_per_subject": True, "allow_direct": True}
        if topic.kind == "work":
            return config | {"retention": "workqueue", "max_msgs": topic.most_messages or self.max_prompts}
        return config | {
            "retention": "limits",
            "max_bytes": -1 if topic.seconds_to_live else self.max_log_bytes,
            "republish": {"src": ">", "dest": f"{_REPUBLISHED}>", "headers_only": True},
        }

    @property
    def objects_bucket(self) -> str:
        return f"asyncrl-{self.run}-weights"

    @property
    def objects_stream(self) -> str:
        return f"OBJ_{self.objects_bucket}"

    def objects_config(self) -> dict[str, Any]:
        """Same configuration as the NATS object store's buckets."""
        return {
            "name": self.objects_stream,
            "subjects": [f"$O.{self.objects_bucket}.C.>", f"$O.{self.objects_bucket}.M.>"],
            "storage": self.storage,
            "num_replicas": self.replicas,
            "retention": "limits",
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "duplicate_window": 120 * _NANOSECONDS,
        }

    def workers(self) -> dict[str, Any]:
        """Configuration of the consumer that all workers share. It sets no max_deliver: workers fail a group themselves
        after too many attempts."""
        return {
            "name": WORKERS,
            "durable_name": WORKERS,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_seconds * _NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": -1,
            "max_waiting": _MANY_WAITING,
            "replay_policy": "instant",
        }


def is_removed(headers: Collection[str]) -> bool:
    """Whether a message with these headers marks its key as removed."""
    return _MARKER in headers or any(name in headers for name in REMOVED)


def token(key: str) -> str:
    """Encode a key as one token of a subject: letters, digits, - and _ unchanged, other bytes as =XX, "" as =."""
    text = re.sub(rb"[^A-Za-z0-9_-]", lambda match: b"=%02X" % match[0][0], key.encode())
    if len(text) > _MAX_KEY_CHARACTERS:
        raise BusError(f"key {key[:40]!r}...: {len(text)} characters on the bus, at most {_MAX_KEY_CHARACTERS} allowed")
    return text.decode() or "="


def key_of(text: str) -> str:
    """Invert ``token``. A token that ``token`` did not make is returned as it is."""
    if text == "=":
        return ""
    plain = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), text.encode())
    return plain.decode(errors="replace")
