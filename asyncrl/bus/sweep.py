"""The last message of each of many subjects in one go: a request for each would take a round trip for each.

A consumer is made for it, asked for all it has, and removed. Tests: tests/test_sweep.py.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, Final

from asyncrl.bus.layout import everything
from asyncrl.bus.pull import Arrival, Wire, arrival, make_consumer
from asyncrl.errors import BusError

_BATCH: Final = 4096
_SILENCE_SECONDS: Final = 10.0


async def last_of_each(wire: Wire, *, stream: str, subjects: str) -> list[Arrival]:
    """Of the subjects that ``subjects`` matches, in the order of their sequences. Raises BusError."""
    sweep = _Sweep(wire)
    subscription = await wire.subscribe(f"{sweep.inbox}.*", sweep.on_message)
    name = f"sweep-{uuid.uuid4().hex}"
    try:
        await make_consumer(wire, stream, everything(name, subjects=subjects))
        order = json.dumps({"batch": _BATCH, "no_wait": True}).encode()
        while True:
            before = len(sweep.found)
            await wire.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", order, reply=f"{sweep.inbox}.more")
            await sweep.until_told(before + _BATCH)
            if len(sweep.found) < before + _BATCH:
                return sweep.found
    except TimeoutError:
        raise BusError(f"{stream}: nothing came for {_SILENCE_SECONDS:.0f} s of what it holds") from None
    finally:
        await wire.unsubscribe(subscription, drain=False)
        await wire.send(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", b"", reply=f"{sweep.inbox}.gone")


class _Sweep:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._changed = asyncio.Event()
        self._is_over = False
        self.inbox = wire.inbox()
        self.found: list[Arrival] = []

    async def until_told(self, count: int) -> None:
        """Until ``count`` have come in all, or the server says that there are no more. Raises TimeoutError."""
        self._is_over = False
        while not self._is_over and len(self.found) < count:
            self._changed.clear()
            async with asyncio.timeout(_SILENCE_SECONDS):
                await self._changed.wait()

    async def on_message(self, message: Any) -> None:
        if (message.headers or {}).get("Status") is None:
            self.found.append(arrival(message, generation=self._wire.generation))
        else:  # no more, or no such consumer: it is gone with a server that was restarted
            self._is_over = True
        self._changed.set()
