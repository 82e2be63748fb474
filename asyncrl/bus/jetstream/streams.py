"""The streams of one run. The learner's role creates them, workers wait for them, and other roles require them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from asyncrl.bus.jetstream.connection import IS_GONE, NO_STREAM, Connection, Refused
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.port import LogMark
from asyncrl.errors import BusLost, ConfigError, Forbidden, NoSuchRun
from asyncrl.messages.topics import ALL, NAMED_ROLES, Topic

logger = logging.getLogger(__name__)

_NAME_IN_USE: Final = 10058
_OTHER_SETTINGS: Final = (10052, _NAME_IN_USE, 10061, 10065, 10069)
"""Invalid for this stream; name in use; replicas that cannot change; subjects of another stream; update refused."""
_FEW_PEERS: Final = 10005  # no suitable peers for placement
_NO_PEERS: Final = (_FEW_PEERS, 10074)  # replicas > 1 in non-clustered mode
_PEERS_SECONDS: Final = 30.0
_PEERS_PAUSE_SECONDS: Final = 0.5
_NO_MESSAGE: Final = 10037
_NO_CONSUMER: Final = (10014, NO_STREAM)
_NO_ROOM: Final = (10023, 10028, 10047)  # insufficient resources, memory, storage
_LONG_PAUSE: Final = 1.6
_ELECTION_SECONDS: Final = 10.0
_AT_ONCE: Final = 64
"""Maximum number of concurrent requests, each for one state."""


class Streams:
    """The learner's role creates or resizes the streams. Workers wait for them. Other roles require them."""

    def __init__(self, connection: Connection, layout: Layout, *, role: str) -> None:
        self._connection, self._layout, self._role = connection, layout, role
        self.known: dict[str, dict[str, Any]] = {}
        """Streams known to exist, with the server's description when they were last looked at."""
        self._is_waiting = False  # whether we wait for the run's streams

    async def open(self, topics: Iterable[Topic[Any]]) -> None:
        """Open the streams of a run concurrently, in one round trip. Raises NoSuchRun if none exists. An observer sees
        what is left of a run."""
        one_each = {self._layout.stream(topic): topic for topic in topics}
        if self._role == "learner" or self._role in NAMED_ROLES:
            await asyncio.gather(*(self.ensure(topic) for topic in one_each.values()))
            return
        await asyncio.gather(*(self._find(name) for name in one_each))
        if not self.known:
            await self._require(next(iter(one_each)))

    async def _find(self, name: str) -> bool:
        """Look up a stream. Return whether it exists."""
        try:
            self.known[name] = await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False)
        except Refused as refused:
            if not refused.description.endswith(IS_GONE):
                raise
            return False
        return True

    async def ensure(self, topic: Topic[Any]) -> str:
        """Return the name of the topic's stream, which is created or resized on first use."""
        name = self._layout.stream(topic)
        if name in self.known:
            return name
        if self._role != "learner":
            await (self._wait_until_created(name) if self._role in NAMED_ROLES else self._require(name))
            return name
        config = self._layout.stream_config(topic)
        where = f"bus {self._connection.name}: {name}"
        try:
            self.known[name] = await self._make(name, config)
        except Refused as refused:
            if refused.code in _NO_PEERS:
                raise ConfigError(
                    f"{where}: bus.replicas {self._layout.replicas} needs as many servers in one cluster, all of them "
                    f"up and with JetStream ({refused.description}); start them or lower bus.replicas"
                ) from None
            if refused.code in _NO_ROOM:
                raise ConfigError(
                    f"{where}: the server has no room for it ({refused.description}); lower bus.max_log_bytes "
                    f"(now {self._layout.max_log_bytes:,}) or give the server more (max_file_store)"
                ) from None
            if refused.code in _OTHER_SETTINGS:
                raise ConfigError(
                    f"{where}: exists with other settings ({refused.description}); use the settings it had "
                    "(bus.store, bus.replicas) or choose another run.name"
                ) from None
            raise
        return name

    async def check(self, *, has_objects: bool) -> None:
        """See Bus.check. ``has_objects``: whether this process made the object store."""
        objects = self._layout.objects_stream
        if has_objects and objects not in self.known:
            self.known[objects] = await require_unchanged(self._connection, objects, LogMark())
        await asyncio.gather(*map(self._check, tuple(self.known)))
        for stream in (self._layout.stream(topic) for topic in ALL if topic.kind == "work"):
            if self.known[stream]["state"]["consumer_count"]:
                continue
            if not await consumer_exists(self._connection, stream):  # a cluster's new leader may not count it yet
                raise lost(self._connection, f"consumer {WORKERS} of {stream}", "it was deleted")

    async def _check(self, name: str) -> None:
        before = self.known[name]
        # A killed server may count an empty stream with expiry anew, so only its identity is compared.
        last = 0 if before["config"].get("max_age") else int(before["state"]["last_seq"])
        mark = LogMark(log=str(before["created"]), sequence=last)
        self.known[name] = await require_unchanged(self._connection, name, mark, replicas=self._layout.replicas)

    async def _make(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        """waits for: the servers of a starting cluster"""
        since = time.monotonic()
        while True:
            try:
                return await create_or_update(self._connection, config)
            except Refused as refused:
                if refused.code != _FEW_PEERS or time.monotonic() - since >= _PEERS_SECONDS:
                    raise
            if not self._is_waiting:
                self._is_waiting = True  # one line for all streams
                logger.warning(
                    "bus %s: fewer servers are up than bus.replicas = %d; waiting for the others for %.0f s",
                    self._connection.name,
                    self._layout.replicas,
                    _PEERS_SECONDS,
                )
            await asyncio.sleep(_PEERS_PAUSE_SECONDS)

    async def _require(self, name: str) -> None:
        """Look up a stream. Raises ConfigError if it does not exist; for a missing run, the error lists the others."""
        if await self._find(name):
            return
        if self.known:
            raise ConfigError(
                f"bus {self._connection.name}: run {self._layout.run!r} has no {name}: somebody deleted the stream; "
                "`asyncrl run FILE --resume` makes it again"
            )
        raise NoSuchRun(
            f"bus {self._connection.name}: no run {self._layout.run!r} there; set run.name to one of: "
            f"{await self._runs()}"
        )

    async def _runs(self) -> str:
        """List the existing runs. Raises Forbidden if the role may not list them."""
        names: list[str] = []
        while True:  # the server returns at most 1,024 names at a time
            page = await self._connection.api("STREAM.NAMES", {"subject": "asyncrl.>", "offset": len(names)})
            some = page.get("streams") or ()
            names += some
            if not some or len(names) >= page.get("total", 0):
                break
        runs = {stream.split("-", 1)[1].rpartition("-")[0] for stream in names}
        return ", ".join(sorted(runs)) or "(there is none)"

    async def _wait_until_created(self, name: str) -> None:
        """waits for: the learner, which creates the run's streams"""
        pause, others = 0.05, ""
        while True:
            try:
                self.known[name] = await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False)
                return
            except Refused as refused:
                if refused.code != NO_STREAM:
                    raise
            if pause == _LONG_PAUSE and not self._is_waiting:
                self._is_waiting = True  # one line for all streams
                with contextlib.suppress(Forbidden):  # this role may not list runs
                    others = f"; runs there: {await self._runs()}"
                logger.warning(
                    "bus %s: no run %r there yet; waiting for its learner%s",
                    self._connection.name,
                    self._layout.run,
                    others,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONG_PAUSE + 0.1)


async def create_or_update(connection: Connection, config: Mapping[str, Any]) -> dict[str, Any]:
    """Create a stream, or update an existing one to this configuration. Return its description. Raises Refused."""
    name = config["name"]
    try:
        return await connection.api(f"STREAM.CREATE.{name}", config, awaits_stream=False)
    except Refused as refused:
        if refused.code != _NAME_IN_USE:
            raise
    return await connection.api(f"STREAM.UPDATE.{name}", config, awaits_stream=False)


async def inspect(connection: Connection, stream: str, mark: LogMark) -> tuple[dict[str, Any], str]:
    """Return a stream's description, and why it is not the stream of ``mark`` any more, or "".

    A stream that lost its end continues counting from there, so ``mark`` then names another entry, or none. Raises
    Refused if the stream is gone.
    """
    info = await connection.api(f"STREAM.INFO.{stream}", awaits_stream=False)
    created, last = str(info["created"]), int(info["state"]["last_seq"])
    problem = ""
    if mark.log and mark.log != created:
        problem = f"it was created again at {created}"
    elif last < mark.sequence:
        problem = f"it ends at entry {last}, and entry {mark.sequence} was there"
    elif mark.stored and (found := await leaders_message(connection, stream, {"seq": mark.sequence})) is not None:
        problem = "" if found.stored == mark.stored else f"entry {mark.sequence} is not the one that was read"
    return info, problem


async def require_unchanged(connection: Connection, stream: str, mark: LogMark, *, replicas: int = 1) -> dict[str, Any]:
    """Return the description of the stream of ``mark``. Raises BusLost if it was deleted, recreated or reset.

    A replicated stream may have a new leader that has not applied the last entries yet: it is asked again for a while.
    """
    until = time.monotonic() + (_ELECTION_SECONDS if replicas > 1 else 0.0)
    while True:
        try:
            info, problem = await inspect(connection, stream, mark)
        except Refused as refused:
            if refused.code != NO_STREAM:
                raise
            info, problem = {}, "it was deleted"
        if not problem:
            return info
        if time.monotonic() >= until:
            raise lost(connection, stream, problem)
        await asyncio.sleep(_LONG_PAUSE)


async def consumer_exists(connection: Connection, stream: str) -> bool:
    """Whether the consumer that all workers share exists on the stream of a work topic."""
    try:
        await connection.api(f"CONSUMER.INFO.{stream}.{WORKERS}")
    except Refused as refused:
        if refused.code not in _NO_CONSUMER:
            raise
        return False
    return True


def lost(connection: Connection, name: str, problem: str) -> BusLost:
    return BusLost(
        f"bus {connection.name}: the run's {name} is gone: {problem}; `asyncrl run FILE --resume` makes it again and "
        "publishes the outstanding groups"
    )


# -- stored messages --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as stored in the stream."""

    sequence: int
    data: bytes
    headers: Mapping[str, str]
    subject: str = ""
    stored: int = 0


async def last_stored(connection: Connection, *, stream: str, subject: str) -> StoredMessage | None:
    """Return the last message under a subject, from the stream's leader; other servers of a cluster may lag."""
    return await leaders_message(connection, stream, {"last_by_subj": subject})


async def read_message(connection: Connection, stream: str, sequence: int) -> StoredMessage | None:
    """Return a message by its sequence; None if it is gone. Any server of a cluster may answer. A server that does not
    have the message may only lag behind, so then the leader is asked."""
    body = {"seq": sequence}
    answer = await connection.request(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode())
    headers = answer.headers
    if "Status" in headers:
        return await leaders_message(connection, stream, body)
    stored = nanoseconds(headers["Nats-Time-Stamp"])
    return StoredMessage(sequence, answer.data, headers, subject=headers["Nats-Subject"], stored=stored)


async def leaders_message(connection: Connection, stream: str, which: Mapping[str, Any]) -> StoredMessage | None:
    """Return a message from the stream's leader. ``which``: {"last_by_subj": SUBJECT} or {"seq": SEQUENCE}."""
    try:
        found = (await connection.api(f"STREAM.MSG.GET.{stream}", which))["message"]
    except Refused as refused:
        if refused.code != _NO_MESSAGE:
            raise
        return None
    data, headers = (base64.b64decode(found.get(name) or "") for name in ("data", "hdrs"))
    sequence, stored = int(found["seq"]), nanoseconds(str(found["time"]))
    return StoredMessage(sequence, data, _parsed(headers), subject=str(found["subject"]), stored=stored)


def nanoseconds(time: str) -> int:
    """Parse a time such as 2026-11-23T05:30:22.742607002Z to nanoseconds since 1970."""
    seconds, _, fraction = time.rstrip("Z").partition(".")
    whole = int(datetime.fromisoformat(f"{seconds}+00:00").timestamp())
    return whole * 10**9 + int(fraction.ljust(9, "0") or 0)


def _parsed(headers: bytes) -> dict[str, str]:
    """Parse the headers of a stored message: a line "NATS/1.0", then lines "NAME: VALUE"."""
    lines = headers.decode(errors="replace").split("\r\n")[1:]  # anyone may have written them
    return {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


async def remove_message(connection: Connection, stream: str, sequence: int) -> None:
    """Delete a message. Does nothing if it is already gone."""
    try:
        await connection.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    except Refused as refused:
        if not refused.description.endswith(IS_GONE):
            raise


async def subjects(connection: Connection, stream: str, *, matching: str) -> dict[str, int]:
    """Return the subjects that hold messages, with their counts. The server returns at most 100,000 at a time."""
    found: dict[str, int] = {}
    while True:
        page = await connection.api(f"STREAM.INFO.{stream}", {"subjects_filter": matching, "offset": len(found)})
        some = page["state"].get("subjects") or {}
        found |= some
        if not some or len(found) >= page.get("total", 0):
            return found


def batches(subjects: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split subjects into groups that may be requested concurrently."""
    return (subjects[start : start + _AT_ONCE] for start in range(0, len(subjects), _AT_ONCE))
