"""The consumers of work topics, which all workers share. The learner creates them; workers wait for it.

Workers may not create a consumer, because then they could also change it: with another filter the consumer delivers
nothing, and the run stops.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from asyncrl.bus.jetstream.connection import Connection, Refused
from asyncrl.bus.jetstream.layout import WORKERS, Layout
from asyncrl.bus.jetstream.ordered_consumer import make_consumer
from asyncrl.messages.topics import ALL, Topic

logger = logging.getLogger(__name__)

_NOT_THERE: Final = (10014, 10059)  # no such consumer; no such stream
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 1.6


class SharedConsumers:
    """The shared consumer of each work topic."""

    def __init__(self, connection: Connection, layout: Layout, *, role: str) -> None:
        self._connection, self._layout, self._role = connection, layout, role
        self._kept = {topic.name: self._made(topic) for topic in ALL if topic.kind == "work"}

    def of(self, topic: Topic[Any]) -> SharedConsumer:
        return self._kept.get(topic.name) or self._made(topic)

    async def start(self) -> None:
        await asyncio.gather(*(consumer.ready() for consumer in self._kept.values()))

    def _made(self, topic: Topic[Any]) -> SharedConsumer:
        return SharedConsumer(self._connection, self._layout, stream=self._layout.stream(topic), role=self._role)


class SharedConsumer:
    """``stream``: existing stream of a work topic."""

    def __init__(self, connection: Connection, layout: Layout, *, stream: str, role: str) -> None:
        self._connection, self._layout, self._stream, self._role = connection, layout, stream, role

    async def ready(self) -> None:
        """Return once the consumer exists.

        waits for: the learner
        """
        if self._role != "rollout-worker":
            await make_consumer(self._connection, self._stream, self._layout.workers())
            return
        pause = _FIRST_PAUSE_SECONDS
        while not await self._is_there():
            await asyncio.sleep(pause)
            if pause == _LAST_PAUSE_SECONDS:
                logger.warning("%s: waiting for the learner to create the workers' consumer", self._stream)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS + 0.1)

    async def _is_there(self) -> bool:
        try:
            await self._connection.api(f"CONSUMER.INFO.{self._stream}.{WORKERS}")
        except Refused as refused:
            if refused.code not in _NOT_THERE:
                raise
            return False
        return True
