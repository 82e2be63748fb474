"""Detects changes of the run's streams and of the workers' consumers, and repairs them.

A client with the server's own password may delete, purge, alter or replace a stream during a run, and a server may lose
its store. Only the learner's role repairs, because it owns JetStream. A stream that no update can restore (sealed, or
with another storage) is deleted and created again. Everything on a stream can be published again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.errors import NO_STREAM, STREAM_GONE, Refused
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.jetstream.lease import Lease
from asyncrl.bus.jetstream.stream_state import StreamState, altered, lost
from asyncrl.bus.jetstream.streams import ALWAYS, NAME_IN_USE, OTHER_SETTINGS, OTHER_SUBJECTS, made_stream, recreated
from asyncrl.bus.port import Loss
from asyncrl.messages.topics import ALL, PIECES, Topic

_NO_CONSUMER: Final = 10014
_REMOVAL_SECONDS: Final = 0.5
"""The server reports a deletion before it removes the files. Files created in between would be removed as well."""
_FIXED: Final = ({*OTHER_SETTINGS} | STREAM_GONE) - {NO_STREAM, NAME_IN_USE, OTHER_SUBJECTS}
"""Errors of an update for which deleting and creating the stream helps."""


class StreamKeeper:
    """``made``: streams known to exist, with the server's description at that time."""

    def __init__(
        self, connection: Connection, layout: Layout, *, made: Mapping[str, Mapping[str, Any]], role: str
    ) -> None:
        self._connection, self._layout, self._role = connection, layout, role
        self._made = made
        self._seen: dict[str, StreamState] = {}
        self._consumers: dict[str, StreamState | None] = {}  # by stream
        self._trimmed: dict[str, int] = {}
        self.has_objects = False
        """Whether this process created the object store."""

    def trims(self, stream: str, through: int) -> None:
        """Note that we are about to remove a log's entries up to sequence ``through``."""
        self._trimmed[stream] = max(through, self._trimmed.get(stream, 0))

    async def look(self, *, repairs: bool) -> list[Loss]:
        """Return what changed since the last look, or since the streams were created. Raises BusError."""
        topics: dict[str, list[Topic[Any]]] = {}
        for topic in (*ALL, Lease.TOPIC):
            topics.setdefault(self._layout.stream(topic), []).append(topic)
        always = {self._layout.stream(topic) for topic in ALWAYS}
        looks = [
            self._stream(name, held, repairs=repairs)
            for name, held in topics.items()
            if name in self._made or name in always or repairs
        ]
        if self._role == "learner":
            looks.append(self._objects(repairs=repairs))
        losses = [loss for loss in await asyncio.gather(*looks) if loss is not None]
        if self._role == "learner":
            gone = {loss.name for loss in losses if loss.is_gone}
            lost_streams = {loss.name for loss in losses}
            for topic in (topic for topic in ALL if topic.kind == "work"):
                stream = self._layout.stream(topic)
                if stream in gone:
                    continue
                loss = await self._workers(topic, repairs=repairs)
                if loss is not None and stream not in lost_streams:  # a lost stream takes its consumer with it
                    losses.append(loss)
        return losses

    async def _stream(self, name: str, topics: list[Topic[Any]], *, repairs: bool) -> Loss | None:
        if name not in self._seen and name in self._made:
            self._seen[name] = StreamState.of(self._made[name])
        kind: str = topics[0].kind
        if topics[0].seconds_to_live:
            kind = "aged" if kind == "log" else ""
        if (kind == "log" and not repairs) or topics[0] is PIECES:
            kind = ""  # an observer does not know what the learner trims; pieces leave one at a time
        config = self._layout.stream_config(topics[0])
        return await self._compared(name, config, tuple(t.name for t in topics), kind=kind, repairs=repairs)

    async def _objects(self, *, repairs: bool) -> Loss | None:
        """Check the object store, which another process may have created. The weight channel checks its contents."""
        name = self._layout.objects_stream
        if name not in self._seen:
            if (now := await self._info(name)) is not None:
                self._seen[name] = now
            if now is not None or not self.has_objects:
                return None
        config = self._layout.objects_config()
        return await self._compared(name, config, (), kind="", repairs=repairs)

    async def _compared(
        self,
        name: str,
        config: dict[str, Any],
        topics: tuple[str, ...],
        *,
        kind: str,
        repairs: bool,
    ) -> Loss | None:
        before, now = self._seen.get(name), await self._info(name)
        if now is None:
            problem = "was deleted"
        elif before is None:  # it was missing when we started
            self._seen[name] = now
            return None
        else:
            problem = lost(before, now, kind=kind, trimmed=self._trimmed.get(name, 0))
            if changed := altered(before, now):
                problem = f"{problem} and {changed}" if problem else changed
            if problem and not changed:
                self._forget_trims(name, before, now)
            if not changed:
                self._seen[name] = now
                return Loss(name=name, topics=topics, problem=problem, is_repaired=True) if problem else None
        if not repairs:
            if now is not None and before is not None:
                self._seen[name] = replace(now, config=before.config)  # reported until it is repaired
            return Loss(name=name, topics=topics, problem=problem, is_gone=now is None)
        try:
            self._seen[name] = StreamState.of(await self._made_again(config, is_gone=now is None))
        except Refused as refused:
            problem += f", and cannot be made again ({refused.description})"
            return Loss(name=name, topics=topics, problem=problem, is_gone=now is None)
        self._forget_trims(name, before, self._seen[name])
        return Loss(name=name, topics=topics, problem=problem, is_repaired=True)

    def _forget_trims(self, name: str, before: StreamState | None, now: StreamState) -> None:
        if before is None or now.created != before.created or now.last < before.last:
            self._trimmed.pop(name, None)

    async def _info(self, name: str) -> StreamState | None:
        """Return the state of a stream; None if it does not exist."""
        try:
            return StreamState.of(await self._connection.api(f"STREAM.INFO.{name}", awaits_stream=False))
        except Refused as refused:
            if refused.code != NO_STREAM:
                raise
            return None

    async def _made_again(self, config: dict[str, Any], *, is_gone: bool) -> dict[str, Any]:
        if is_gone:
            await asyncio.sleep(_REMOVAL_SECONDS)
        try:
            return await made_stream(self._connection, config)
        except Refused as refused:
            if refused.code not in _FIXED:
                raise
        return await recreated(self._connection, config)

    # -- the workers' consumer -----------------------------------------------------------------------------------------

    async def _workers(self, topic: Topic[Any], *, repairs: bool) -> Loss | None:
        """Check the workers' consumer. shared_consumer.py recreates a deleted one; this also repairs an altered one."""
        stream = self._layout.stream(topic)
        before, now = self._consumers.get(stream), await self._consumer_info(stream)
        if before is None and now is not None:  # perhaps from an earlier incarnation, and altered or paused since
            before = StreamState(now.created, self._layout.workers())
        name = f"{stream} {WORKERS}"
        problem = "was deleted" if now is None or before is None else altered(before, now)
        if now is not None and not problem:
            problem = "was deleted and recreated" if before is not None and before.created != now.created else ""
            self._consumers[stream] = now
            return Loss(name=name, topics=(topic.name,), problem=problem, is_repaired=True) if problem else None
        if repairs:
            await self._make_consumer(stream, is_there=now is not None)
            self._consumers[stream] = await self._consumer_info(stream)
        return Loss(name=name, topics=(topic.name,), problem=problem, is_gone=now is None, is_repaired=repairs)

    async def _consumer_info(self, stream: str) -> StreamState | None:
        try:
            info = await self._connection.api(f"CONSUMER.INFO.{stream}.{WORKERS}", awaits_stream=False)
        except Refused as refused:
            if refused.code not in (_NO_CONSUMER, NO_STREAM):
                raise
            return None
        return StreamState.of(info)

    async def _make_consumer(self, stream: str, *, is_there: bool) -> None:
        """Delete and create the consumer: an update undoes some changes, but not others, such as a pause."""
        if is_there:
            await self._connection.api(f"CONSUMER.DELETE.{stream}.{WORKERS}", awaits_stream=False)
        await asyncio.sleep(_REMOVAL_SECONDS)
        config = {"stream_name": stream, "config": self._layout.workers()}
        await self._connection.api(f"CONSUMER.CREATE.{stream}.{WORKERS}", config, awaits_stream=False)
