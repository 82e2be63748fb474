"""The streams of one run. The learner's role creates them, workers wait for them, and other roles require them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.errors import IS_GONE, NO_STREAM, Refused
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.errors import ConfigError, Forbidden, NoSuchRun
from asyncrl.messages.topics import ACTORS, PROGRESS, PROMPTS, TRAJECTORIES, Topic

logger = logging.getLogger(__name__)

ALWAYS: Final = (PROMPTS, TRAJECTORIES, PROGRESS, ACTORS)
"""Topics that every version of asyncrl creates."""

NAME_IN_USE: Final = 10058
OTHER_SUBJECTS: Final = 10065
OTHER_SETTINGS: Final = (10052, NAME_IN_USE, 10061, OTHER_SUBJECTS, 10069)
"""Invalid for this stream; name in use; replicas that cannot change; subjects of another stream; update refused."""
_FEW_PEERS: Final = 10005  # no suitable peers for placement
_NO_PEERS: Final = (_FEW_PEERS, 10074)  # replicas > 1 in non-clustered mode
_PEERS_SECONDS: Final = 30.0
_PEERS_PAUSE_SECONDS: Final = 0.5
_NO_ROOM: Final = (10023, 10028, 10047)  # insufficient resources, memory, storage
_LONG_PAUSE: Final = 1.6
_FOR_GOOD: Final = ("sealed", "deny_delete", "deny_purge")
"""Settings that no update can undo and that asyncrl never sets. Another storage or other replicas may come from the
run file."""
_REMOVAL_SECONDS: Final = 0.5
"""The server reports a deletion before it removes the files. Files created in between would be removed as well."""
_AT_ONCE: Final = 64
"""Maximum number of concurrent requests, each for one state."""


class Streams:
    """The learner's role creates or resizes the streams. Workers wait for them. Other roles require them."""

    def __init__(self, connection: Connection, layout: Layout, *, role: str) -> None:
        self._connection, self._layout, self._role = connection, layout, role
        self.made: dict[str, dict[str, Any]] = {}
        """Streams known to exist, with the server's description."""
        self._is_waiting = False  # whether we wait for the run's streams

    async def open(self, topics: Iterable[Topic[Any]]) -> None:
        """Open the streams of a run concurrently, in one round trip. Raises NoSuchRun if none exists. An observer sees
        what is left of a run."""
        one_each = {self._layout.stream(topic): topic for topic in topics}
        if self._role in ("learner", "rollout-worker"):
            await asyncio.gather(*(self.of(topic) for topic in one_each.values()))
            return
        await asyncio.gather(*(self._find(name) for name in one_each))
        if not self.made:
            await self._require(next(iter(one_each)))

    async def _find(self, name: str) -> None:
        """Look up a stream. Ignore it if it does not exist."""
        try:
            self.made[name] = await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False)
        except Refused as refused:
            if not refused.description.endswith(IS_GONE):
                raise

    async def of(self, topic: Topic[Any]) -> str:
        """Return the name of the topic's stream, which is created or resized on first use."""
        name = self._layout.stream(topic)
        if name in self.made:
            return name
        if self._role != "learner":
            await (self._until_made(name) if self._role == "rollout-worker" else self._require(name))
            return name
        config = self._layout.stream_config(topic)
        where = f"bus {self._connection.name}: {name}"
        try:
            self.made[name] = await self._make(name, config)
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
            if refused.code in OTHER_SETTINGS and (shut := await self._shut(name, config)):
                logger.warning("the bus: %s was altered while no learner was up: %s; it is recreated", name, shut)
                self.made[name] = await recreated(self._connection, config)
                return name
            if refused.code in OTHER_SETTINGS:
                raise ConfigError(
                    f"{where}: exists with other settings ({refused.description}); use the settings it had "
                    "(bus.store, bus.replicas) or choose another run.name"
                ) from None
            raise
        return name

    async def _make(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        """waits for: the servers of a starting cluster"""
        since = time.monotonic()
        while True:
            try:
                return await made_stream(self._connection, config)
            except Refused as refused:
                if refused.code != _FEW_PEERS or time.monotonic() - since >= _PEERS_SECONDS:
                    raise
            if not self._is_waiting:
                self._is_waiting = True  # one line for all streams
                logger.warning(
                    "bus %s: fewer servers are up than bus.replicas = %d; waiting for the others for %.0f s",
                    *(self._connection.name, self._layout.replicas, _PEERS_SECONDS),
                )
            await asyncio.sleep(_PEERS_PAUSE_SECONDS)

    async def _shut(self, name: str, config: Mapping[str, Any]) -> str:
        """Return a setting that was switched on and that no update can undo; "" if only other settings differ."""
        there = (await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False))["config"]
        return next((one for one in _FOR_GOOD if there.get(one) and not config.get(one)), "")

    async def _require(self, name: str) -> None:
        """Look up a stream. Raises ConfigError if it does not exist; for a missing run, the error lists the others."""
        try:
            self.made[name] = await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False)
        except Refused as refused:
            if not refused.description.endswith(IS_GONE):
                raise
            if self.made:
                raise ConfigError(
                    f"bus {self._connection.name}: run {self._layout.run!r} has no {name}: somebody deleted the "
                    "stream; the run's learner creates it again"
                ) from None
            raise NoSuchRun(
                f"bus {self._connection.name}: no run {self._layout.run!r} there; set run.name to one of: "
                f"{await self._runs()}"
            ) from None

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

    async def _until_made(self, name: str) -> None:
        """waits for: the learner, which creates the run's streams"""
        pause, others = 0.05, ""
        while True:
            try:
                self.made[name] = await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False)
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


async def made_stream(connection: Connection, config: Mapping[str, Any]) -> dict[str, Any]:
    """Create a stream, or update an existing one to this configuration. Return its description. Raises Refused."""
    name = config["name"]
    try:
        return await connection.api(f"STREAM.CREATE.{name}", config, awaits_stream=False)
    except Refused as refused:
        if refused.code != NAME_IN_USE:
            raise
    return await connection.api(f"STREAM.UPDATE.{name}", config, awaits_stream=False)


async def recreated(connection: Connection, config: Mapping[str, Any]) -> dict[str, Any]:
    """Delete a stream that cannot be updated to this configuration, and create it. Raises Refused."""
    await connection.api(f"STREAM.DELETE.{config['name']}", awaits_stream=False)
    await asyncio.sleep(_REMOVAL_SECONDS)
    return await made_stream(connection, config)


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
