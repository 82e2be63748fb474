"""The last message of each of many subjects in one go: a request for each would take a round trip for each.

A consumer is made for it, asked for all it has, and removed. When it goes with its server before it has brought all,
another one is made. Tests: tests/test_sweep.py, tests/test_nats_cluster.py.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any, Final

from asyncrl.bus.layout import everything
from asyncrl.bus.pull import USED_UP, Arrival, Wire, arrival, make_consumer, next_pause
from asyncrl.errors import BusError, Unanswered

_BATCH: Final = 4096
_SILENCE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0


async def last_of_each(wire: Wire, *, stream: str, subjects: str) -> list[Arrival]:
    """Of the subjects that ``subjects`` matches, in the order of their sequences. Raises BusError."""
    since, pause = time.monotonic(), 0.0
    while True:
        try:
            return await _swept(wire, stream=stream, subjects=subjects)
        except (TimeoutError, Unanswered):
            if time.monotonic() - since > _PATIENCE_SECONDS:
                raise BusError(f"{stream}: nothing came for {_PATIENCE_SECONDS:.0f} s of what it holds") from None
        pause = next_pause(pause)
        await asyncio.sleep(pause)


async def _swept(wire: Wire, *, stream: str, subjects: str) -> list[Arrival]:
    """All of it. Raises Unanswered or TimeoutError when the consumer is at a server that is not there any more."""
    sweep = _Sweep(wire)
    subscription = await wire.subscribe(f"{sweep.inbox}.*", sweep.on_message)
    name = f"sweep-{uuid.uuid4().hex}"
    try:
        await make_consumer(wire, stream, everything(name, subjects=subjects), patience=0.0)
        order = json.dumps({"batch": _BATCH, "no_wait": True}).encode()
        while True:
            before = len(sweep.found)
            await wire.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", order, reply=f"{sweep.inbox}.more")
            await sweep.until_told(before + _BATCH)
            if len(sweep.found) < before + _BATCH:
                return sweep.found
    finally:
        await wire.unsubscribe(subscription, drain=False)
        await wire.send(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", b"", reply=f"{sweep.inbox}.gone")


class _Sweep:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._changed = asyncio.Event()
        self._is_over = False
        self._is_gone = False
        self.inbox = wire.inbox()
        self.found: list[Arrival] = []

    async def until_told(self, count: int) -> None:
        """Until ``count`` have come in all, or the server says that there are no more. Raises TimeoutError when it says
        nothing, or that the consumer is gone."""
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
            self.found.append(arrival(message, generation=self._wire.generation))
        elif status in USED_UP:
            self._is_over = True
        else:
            self._is_gone = True
        self._changed.set()
