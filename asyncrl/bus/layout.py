"""How topics lie on JetStream: names, subjects, and the configuration of every stream and consumer. Pure.

topic       stream                     subject                              kept
work        asyncrl-RUN-TOPIC          asyncrl.RUN.TOPIC.KEY                until acked; max_prompts of them
log         asyncrl-RUN-TOPIC          asyncrl.RUN.TOPIC.KEY                until trimmed or too old; max_log_bytes
state       KV_asyncrl-RUN-state       $KV.asyncrl-RUN-state.TOPIC.KEY      the last of each key
state, TTL  KV_asyncrl-RUN-TOPIC       $KV.asyncrl-RUN-TOPIC.TOPIC.KEY      the last of each key, seconds_to_live
objects     OBJ_asyncrl-RUN-weights    $O.asyncrl-RUN-weights.>             until removed (objects.py)

State streams are key-value buckets to the `nats kv` command; the key a/b of a state is a.b in its subject, so that what
is under a/ can be asked for and removed together. A work or log topic refuses a key it holds (one message a subject)
and one it held in the last ten minutes (Nats-Msg-Id). Every worker binds the one durable consumer ``workers``: a
work-queue stream takes no second one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.errors import BusError
from asyncrl.topics import Service, Topic

HEADER_BYTES: Final = 1024
"""Room for headers in the server's max_payload."""

DUPLICATE_SECONDS: Final = 600.0
WORKERS: Final = "workers"

_MAX_KEY_CHARACTERS: Final = 256
_NANOSECONDS: Final = 10**9
_MANY_WAITING: Final = 16_384
"""Pull requests that may wait on the shared consumer: one per rollout worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    run: str
    max_prompts: int
    max_log_bytes: int
    ack_seconds: float
    storage: Literal["file", "memory"]
    replicas: int = 1

    def service(self, service: Service[Any, Any]) -> str:
        """Where a service's questions go; no stream takes them."""
        return f"asyncrl-ask.{self.run}.{service.name}" + (f".{token(service.key)}" if service.key else "")

    def freed(self, lease: str) -> str:
        """Where it is told that a lease came free; no stream takes it."""
        return f"asyncrl-freed.{self.run}.{token(lease)}"

    def stream(self, topic: Topic[Any]) -> str:
        return f"KV_{self._bucket(topic)}" if topic.kind == "state" else f"asyncrl-{self.run}-{topic.name}"

    def prefix(self, topic: Topic[Any]) -> str:
        """What comes before the key in a subject."""
        if topic.kind == "state":
            return f"$KV.{self._bucket(topic)}.{topic.name}."
        return f"asyncrl.{self.run}.{topic.name}."

    def subject(self, topic: Topic[Any], key: str) -> str:
        parts = key.split("/") if topic.kind == "state" else [key]
        return self.prefix(topic) + ".".join(map(token, parts))

    def told(self, topic: Topic[Any], key: str) -> str:
        """Where a state's stream tells what it has stored under ``key``; no stream takes it."""
        return f"asyncrl-told.{self.subject(topic, key).removeprefix('$KV.')}"

    def under(self, topic: Topic[Any], under: str) -> str:
        """The subjects of all keys that begin with ``under``, which is empty or ends in "/"."""
        return (self.subject(topic, under.removesuffix("/")) + "." if under else self.prefix(topic)) + ">"

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
                "republish": {"src": f"$KV.{self._bucket(topic)}.>", "dest": f"asyncrl-told.{self._bucket(topic)}.>"},
                "retention": "limits",
                "allow_direct": True,
                "allow_rollup_hdrs": True,
                "deny_delete": True,
            }
        config |= {"subjects": [self.prefix(topic) + "*"], "discard_new_per_subject": True, "allow_direct": True}
        if topic.kind == "work":
            return config | {"retention": "workqueue", "max_msgs": self.max_prompts}
        return config | {"retention": "limits", "max_bytes": -1 if topic.seconds_to_live else self.max_log_bytes}

    @property
    def objects_bucket(self) -> str:
        return f"asyncrl-{self.run}-weights"

    @property
    def objects_stream(self) -> str:
        return f"OBJ_{self.objects_bucket}"

    def objects_config(self) -> dict[str, Any]:
        """As the NATS object store makes its buckets."""
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
        """The consumer all workers share. No max_deliver: a worker that sees a high attempt buries the group."""
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


def reader(name: str, *, after: int) -> dict[str, Any]:
    """A consumer of one reader, from sequence ``after`` + 1 on."""
    return _ephemeral(name) | {"deliver_policy": "by_start_sequence", "opt_start_seq": after + 1}


def everything(name: str, *, subjects: str) -> dict[str, Any]:
    """A consumer of the last message of each of ``subjects``."""
    return _ephemeral(name) | {"deliver_policy": "last_per_subject", "filter_subject": subjects}


def _ephemeral(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "ack_policy": "none",
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": 60 * _NANOSECONDS,
    }


def token(key: str) -> str:
    """The key as one token of a subject: letters, digits, - and _ as they are, other bytes as =XX, "" as =."""
    text = re.sub(rb"[^A-Za-z0-9_-]", lambda match: b"=%02X" % match[0][0], key.encode())
    if len(text) > _MAX_KEY_CHARACTERS:
        raise BusError(f"key {key[:40]!r}...: {len(text)} characters on the bus; {_MAX_KEY_CHARACTERS} are allowed")
    return text.decode() or "="


def key_of(text: str) -> str:
    """The key that ``token`` made ``text`` from; a foreign token is its own key."""
    if text == "=":
        return ""
    plain = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), text.encode())
    return plain.decode(errors="replace")
