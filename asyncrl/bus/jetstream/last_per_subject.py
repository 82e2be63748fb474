"""Reads the last message of each of many subjects without a round trip per subject.

A temporary consumer delivers all of them and is removed. If its server is lost before that, a new consumer is created.
Tests: tests/unit/bus/test_last_per_subject.py, tests/integration/cluster/test_nats_cluster.py.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any, Final

from asyncrl.bus.jetstream.layout import everything
from asyncrl.bus.jetstream.ordered_consumer import USED_UP, Arrival, Wire, arrival, make_consumer, next_pause
from asyncrl.errors import BusError, Unanswered

_BATCH: Final = 4096
_SILENCE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0


async def last_of_each(wire: Wire, *, stream: str, subjects: str) -> list[Arrival]:
    """Return the last message of each subject that matches ``subjects``, in sequence order. Raises BusError."""
    since, pause = time.monotonic(), 0.0
    while True:
        try:
            return await _collected(wire, stream=stream, subjects=subjects)
        except (TimeoutError, Unanswered):
            if time.monotonic() - since > _PATIENCE_SECONDS:
                raise BusError(f"{stream}: no messages delivered within {_PATIENCE_SECONDS:.0f} s") from None
        pause = next_pause(pause)
        await asyncio.sleep(pause)


async def _collected(wire: Wire, *, stream: str, subjects: str) -> list[Arrival]:
    """Make one attempt. Raises Unanswered or TimeoutError if the consumer's server is gone."""
    collection = _Collection(wire)
    subscription = await wire.subscribe(f"{collection.inbox}.*", collection.on_message)
    name = f"last-of-each-{uuid.uuid4().hex}"
    try:
        await make_consumer(wire, stream, everything(name, subjects=subjects), patience=0.0)
        order = json.dumps({"batch": _BATCH, "no_wait": True}).encode()
        while True:
            before = len(collection.found)
            await wire.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", order, reply=f"{collection.inbox}.more")
            await collection.until_told(before + _BATCH)
            if len(collection.found) < before + _BATCH:
                return collection.found
    finally:
        await wire.unsubscribe(subscription, drain=False)
        await wire.send(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", b"", reply=f"{collection.inbox}.gone")


class _Collection:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._changed = asyncio.Event()
        self._is_over = False
        self._is_gone = False
        self.inbox = wire.inbox()
        self.found: list[Arrival] = []

    async def until_told(self, count: int) -> None:
        """Wait until ``count`` messages have arrived in total, or the server reports that no more exist. Raises
        TimeoutError if the server is silent or reports that the consumer is gone."""
        self._is_over = False
        while not self._is_over and len(self.found) < count:
            self._changed.clear()
            async with asyncio.timeout(_SILENCE_SECONDS):
                await self._changed.wait()
            if self._is_gone:
                raise TimeoutError

    async def on_message(self, message: Any) -> None:
        status = (message.headers or {}).get("Status")
        if status is None:
            if (item := arrival(message, generation=self._wire.generation)) is not None:
                self.found.append(item)
        elif status in USED_UP:
            self._is_over = True
        else:
            self._is_gone = True
        self._changed.set()
