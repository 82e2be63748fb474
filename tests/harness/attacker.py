"""An attacker of a nats-server with roles: what it may try, what the table of rights allows, and what the attack
achieved.

The learner's ear, a subscription to everything in the learner's account, records what came through.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.jetstream.kv import Lease, lease_prefix
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.nats_server import config as nats_config
from asyncrl.bus.nats_server.accounts import account_name
from asyncrl.bus.nats_server.rights import LEASES, OBJECTS, table
from asyncrl.messages.topics import ALL, ALL_SERVICES, NAMED_ROLES, ROLES, Topic
from tests.harness.raw_nats import RawNats
from tests.harness.roles import access_to, started

RUN = "mine"
WORKER, OTHER = "w0", "w1"
"""The worker or server that attacks, and one in whose name it may not write."""
OTHERS = ROLES[1:]
LAYOUT = Layout(run=RUN, max_prompts=64, max_log_bytes=2**20, ack_seconds=30.0, storage="file")
EVERY = (*ALL, Lease.TOPIC)
STREAMS = sorted({LAYOUT.stream(topic) for topic in EVERY} | {LAYOUT.objects_stream})
SERVICES = {
    f"{one.name} (service)": LAYOUT.service(one) + (f".{WORKER}" if one.is_keyed else "") for one in ALL_SERVICES
}
OPEN = "open"
"""A user without permissions, in the account of each role."""

VERBS = re.findall(
    r"\S+",
    """
INFO ACCOUNT.PURGE.{account} ACCOUNT.STREAM.MOVE.{account}.{stream} ACCOUNT.STREAM.CANCEL_MOVE.{account}.{stream}
META.LEADER.STEPDOWN SERVER.REMOVE SERVER.STREAM.MOVE.{account}.{stream}
STREAM.NAMES STREAM.LIST STREAM.CREATE.{stream} STREAM.CREATE.new STREAM.UPDATE.{stream} STREAM.INFO.{stream}
STREAM.DELETE.{stream} STREAM.PURGE.{stream} STREAM.SNAPSHOT.{stream} STREAM.RESTORE.{stream} STREAM.RESTORE.new
STREAM.MSG.DELETE.{stream} STREAM.MSG.GET.{stream} STREAM.PEER.REMOVE.{stream} STREAM.LEADER.STEPDOWN.{stream}
STREAM.TEMPLATE.CREATE.new STREAM.TEMPLATE.NAMES STREAM.TEMPLATE.DELETE.new
CONSUMER.CREATE.{stream} CONSUMER.CREATE.{stream}.{consumer} CONSUMER.CREATE.{stream}.{consumer}.{subject}
CONSUMER.DURABLE.CREATE.{stream}.{consumer} CONSUMER.NAMES.{stream} CONSUMER.LIST.{stream}
CONSUMER.INFO.{stream}.{consumer} CONSUMER.DELETE.{stream}.{consumer} CONSUMER.MSG.NEXT.{stream}.{consumer}
CONSUMER.PAUSE.{stream}.{consumer} CONSUMER.RESET.{stream}.{consumer} CONSUMER.UNPIN.{stream}.{consumer}
CONSUMER.LEADER.STEPDOWN.{stream}.{consumer} DIRECT.GET.{stream} DIRECT.GET.{stream}.{subject}
""",
)


def key_of(topic: Topic[Any], key: str = "1") -> str:
    """Return a subject of the topic's stream; for leases, one of the workers' leases."""
    return lease_prefix(LAYOUT, role="rollout-worker") + key if topic is Lease.TOPIC else LAYOUT.prefix(topic) + key


def keys_of_worker(topic: Topic[Any], worker: str) -> list[str]:
    """Return subjects of a topic that only the worker or the server of this name may write."""
    if not NAMED_ROLES.keys() & {*topic.publishers}:
        return []
    return [LAYOUT.prefix(topic) + worker, f"{LAYOUT.prefix(topic)}{worker}.1"]


def all_keys_of(topic: Topic[Any]) -> list[str]:
    return [key_of(topic), *keys_of_worker(topic, WORKER), *keys_of_worker(topic, OTHER)]


def told(subject: str) -> str:
    """Where a state's stream republishes what is stored under a subject."""
    return f"asyncrl-stored.{subject}"


def subjects_of(stream: str) -> list[str]:
    if stream == LAYOUT.objects_stream:
        return [f"$O.{LAYOUT.objects_bucket}.C.x", f"$O.{LAYOUT.objects_bucket}.M.eA=="]  # of "x"
    found = [key for topic in EVERY if LAYOUT.stream(topic) == stream for key in all_keys_of(topic)]
    return [*found, lease_prefix(LAYOUT, role="learner") + "1"] if stream == LAYOUT.stream(Lease.TOPIC) else found


def api_subjects() -> list[str]:
    found: dict[str, None] = {}
    for verb, stream in itertools.product(VERBS, STREAMS):
        for consumer, subject in itertools.product((WORKERS, "mine"), subjects_of(stream)):
            made = verb.format(account=RUN, stream=stream, consumer=consumer, subject=subject)
            found[f"$JS.API.{made}"] = None
    return list(found)


def stored_subjects() -> list[str]:
    return [subject for stream in STREAMS for subject in subjects_of(stream)]


def other_subjects() -> list[str]:
    """Return subjects outside of any stream on which some client or server may listen."""
    states = [topic for topic in ALL if topic.kind == "state"]
    return [
        *(told(subject) for topic in states for subject in all_keys_of(topic)),
        *SERVICES.values(),
        *(f"{LAYOUT.service(one)}.{OTHER}" for one in ALL_SERVICES if one.is_keyed),
        *(LAYOUT.freed("load-0", role=role) for role in ROLES),
        *(
            f"{kind}.{RUN}.{role}.{name}.1"
            for kind in ("_INBOX", "asyncrl-answer")
            for role in ROLES
            for name in (WORKER, OTHER)
        ),
        *(f"$JS.ACK.{stream}.{WORKERS}.1.1.1.1.0" for stream in STREAMS),
        f"$JS.FC.{STREAMS[0]}.x",
        f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{STREAMS[0]}.{WORKERS}",
        "$SYS.REQ.SERVER.PING",
        "_R_.somebody",
        "_GR_.somebody",
    ]


class May:
    """What one role may do, according only to the words of the table.

    is_open  its user has no permissions: only the accounts bind it, and a worker has the rights of all workers
    """

    def __init__(self, role: str, *, is_open: bool = False) -> None:
        self.names = ("1", WORKER, OTHER) if is_open else (WORKER,)
        lines = [re.split(r" *\| *", line.strip("| ")) for line in table(RUN).splitlines()]
        column = 1 + OTHERS.index(role)
        self.role = role
        self._words = {line[0]: set(re.split(", ?", line[column])) for line in lines[2:]}

    def _has(self, word: str, of: str) -> bool:
        return word in self._words[of]

    def publish(self) -> set[str]:
        """Return the stream subjects that the role may publish to."""
        found = {key_of(topic) for topic in ALL if self._has("publish", topic.name)}
        for topic in ALL:
            if self._has("publish under its name", topic.name):
                own = {one for name in self.names if name != "1" for one in keys_of_worker(topic, name)}
                own |= {key_of(topic)} if "1" in self.names else set()
                # A log takes no bare name, as its reader compares only "NAME/..." with the message's name.
                found |= own if topic.kind == "state" else {one for one in own if one.endswith(".1")} - {key_of(topic)}
        return found | ({key_of(Lease.TOPIC)} if self._has("hold", LEASES) else set())

    def remove(self) -> set[str]:
        return {key_of(topic) for topic in ALL if self._has("remove", topic.name)}

    def ask(self) -> set[str]:
        """Return the allowed requests: to JetStream and to services of the learner."""
        found = {"INFO", *(f"STREAM.INFO.{LAYOUT.stream(topic)}" for topic in EVERY)}
        for topic in ALL:
            stream = LAYOUT.stream(topic)
            if self._has("read", topic.name):
                is_brief = topic.kind == "state" and topic.seconds_to_live and self.role == "rollout-worker"
                is_direct = is_brief and not self._has("follow", topic.name)  # a watch asks the leader
                direct = {f"DIRECT.GET.{stream}.{key}" for key in all_keys_of(topic)}
                found |= direct if is_direct else {f"STREAM.MSG.GET.{stream}"}
            if self._has("take", topic.name):
                found |= {f"CONSUMER.{verb}.{stream}.{WORKERS}" for verb in ("INFO", "MSG.NEXT")}
            if self._has("remove", topic.name):
                found.add(f"STREAM.MSG.DELETE.{stream}")
        if self._has("read", OBJECTS):
            stream = LAYOUT.objects_stream
            found |= {
                f"DIRECT.GET.{stream}",
                f"DIRECT.GET.{stream}.{subjects_of(stream)[1]}",
                f"STREAM.MSG.GET.{stream}",
            }
        if self._has("hold", LEASES):
            found.add(f"STREAM.MSG.GET.{LAYOUT.stream(Lease.TOPIC)}")
        asked = {subject for name, subject in SERVICES.items() if self._words[name] == {"ask"}}
        return {f"$JS.API.{verb}" for verb in found} | asked

    def ack(self) -> set[str]:
        return {
            f"$JS.ACK.{LAYOUT.stream(topic)}.{WORKERS}.1.1.1.1.0"
            for topic in ALL
            if self._has("acknowledge", topic.name)
        }

    def among_themselves(self) -> set[str]:
        """Return the subjects of the role's own account that it may publish to."""
        found = {subject for name, subject in SERVICES.items() if "serve" in self._words[name]}
        found |= {f"asyncrl-answer.{RUN}.{self.role}.{WORKER}.1"} if found else set()
        return found | ({LAYOUT.freed("load-0", role=self.role)} if self._has("hold", LEASES) else set())

    def follow(self) -> set[str]:
        keys = [key for topic in ALL if self._has("follow", topic.name) for key in all_keys_of(topic)]
        if self.role in NAMED_ROLES:  # only keys of one part
            keys = [key for key in keys if not key.endswith((f".{WORKER}.1", f".{OTHER}.1"))]
        return {told(key) for key in keys}

    def reach(self) -> set[str]:
        """Return everything that may arrive in the learner's account, including what its streams announce about it."""
        # A log refuses a subject that it holds, so it announces none of what is tried.
        republished = {told(one) for one in self.publish() if one.startswith("$KV.")}
        return self.publish() | self.ask() | self.ack() | republished


class Attacked:
    """A server with a run, the learner's ear, and users of every role."""

    def __init__(self, directory: Path, *, in_one_account: bool = False) -> None:
        own = ["--directory", str(directory), "--listen", "127.0.0.1:-1"]
        nats_config.main([RUN, *own, "--workers", "2", "--servers", WORKER, OTHER])
        path = directory / nats_config.CONFIG_FILE
        config = json.loads(path.read_text())
        for role in OTHERS:
            config["accounts"][account_name(RUN, role)]["users"].append({"user": f"{OPEN}-{role}", "password": OPEN})
        if in_one_account:
            users = [user for account in config["accounts"].values() for user in account["users"]]
            config["accounts"] = {RUN: {"jetstream": "enabled", "users": users}}
        path.write_text(json.dumps(config))
        self.directory = directory
        self.process, url = started(path, directory / "ports")
        self.port: int = urlsplit(url).port or 0

    def access(self, role: str, *, run: str = RUN, **more: str) -> Credentials:
        return access_to(self.directory / run, role, **more)

    def raw(self, role: str, *, is_open: bool = False) -> RawNats:
        if is_open:
            return RawNats(self.port, f"{OPEN}-{role}", OPEN)
        name = f"{NAMED_ROLES[role]}/{WORKER}" if role in NAMED_ROLES else role
        user, _, password = (self.directory / RUN / name).read_text().strip().partition(":")
        return RawNats(self.port, user, password)

    @contextlib.asynccontextmanager
    async def ear(self) -> AsyncIterator[RawNats]:
        async with self.raw("learner") as ear:
            ear.subscribe(">")
            await ear.flush()
            yield ear


async def snapshot(attacked: Attacked) -> dict[str, Any]:
    """Return the configuration, consumers and messages of every stream."""
    found: dict[str, Any] = {}
    async with attacked.raw("learner") as learner:
        learner.subscribe("here.*")
        for stream in STREAMS:
            for subject in subjects_of(stream):
                body = json.dumps({"last_by_subj": subject}).encode()
                learner.publish(f"$JS.API.STREAM.MSG.GET.{stream}", body, reply=f"here.{len(found)}")
                found[subject] = None
            learner.publish(f"$JS.API.STREAM.INFO.{stream}", reply=f"here.{len(found)}")
            found[f"config of {stream}"] = None
            learner.publish(f"$JS.API.CONSUMER.LIST.{stream}", b'{"offset":0}', reply=f"here.{len(found)}")
            found[f"consumers of {stream}"] = None
        learner.publish("$JS.API.STREAM.NAMES", reply=f"here.{len(found)}")
        found["streams"] = None
        await until(learner, lambda: len(learner.heard) >= len(found))
    names = list(found)
    for message in learner.heard:
        name, answer = names[int(message.subject.partition(".")[2])], json.loads(message.data)
        if name.startswith("config"):
            found[name] = answer["config"]
        elif name.startswith("consumers"):
            found[name] = [one["config"] for one in answer["consumers"]]
        else:
            found[name] = sorted(answer["streams"]) if name == "streams" else answer.get("message")
    return found


@contextlib.asynccontextmanager
async def unharmed(attacked: Attacked, may: May) -> AsyncIterator[RawNats]:
    """The learner's ear. On exit, checks that streams changed only where the role may publish or remove."""
    before = await snapshot(attacked)
    async with attacked.ear() as ear:
        yield ear
    after = await snapshot(attacked)
    changed = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    harmed = changed - may.publish() - may.remove()
    assert not harmed, {name: (before.get(name), after.get(name)) for name in harmed}


async def until(client: RawNats, is_so: Any) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await client.flush()


async def settled(attacked: Attacked, role: str) -> None:
    """Wait until earlier messages have arrived: later requests on the same route must be answered."""
    async with attacked.raw(role) as client:
        inbox = f"_INBOX.{RUN}.{role}.{WORKER}"
        client.subscribe(f"{inbox}.>")
        for number in range(3):
            client.publish("$JS.API.INFO", reply=f"{inbox}.settled.{number}")
            await until(client, lambda number=number: len(client.heard) > number)


def through(ear: RawNats) -> set[str]:
    """Return subjects of messages that came into the learner's account, without the server's own messages and outgoing
    answers.

    A prompt on its way to a worker has the subject under which it is stored, and a reply subject for its ack.
    """
    own = ("_R_.", "$JS.EVENT.", "$SYS.")
    lent = tuple(f"$JS.ACK.{LAYOUT.stream(topic)}.{WORKERS}." for topic in ALL if topic.kind == "work")
    return {one.subject for one in ear.heard if not one.subject.startswith(own) and not one.reply.startswith(lent)}
