"""Cancellations that nats-py may swallow."""

from __future__ import annotations

import asyncio

from asyncrl.bus.jetstream.cancellation import guarded


async def test_the_guard_notices_a_swallowed_cancellation() -> None:
    """The race of Python 3.11: the reply and the cancellation arrive together, and wait_for returns the reply."""

    async def deaf() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "went on as if never cancelled"
        return "not reached"

    task = asyncio.create_task(guarded(deaf()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
