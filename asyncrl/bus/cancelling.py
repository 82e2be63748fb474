"""A cancellation is never lost: Python 3.11's ``wait_for`` inside nats-py swallows one that races a reply.

It can go with Python 3.11. Test: tests/test_jetstream.py, test_a_cancellation_is_never_lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def guarded(call: Awaitable[T]) -> T:
    """``await call``, and CancelledError if a cancellation came meanwhile, whatever the call made of it."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
