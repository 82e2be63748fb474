"""Works around Python 3.11's ``wait_for``, used by nats-py, which swallows a cancellation that races a reply.

Remove with support for Python 3.11. Tests: test_a_cancellation_is_never_lost,
test_the_guard_notices_a_swallowed_cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def guarded(call: Awaitable[T]) -> T:
    """``await call``; raises CancelledError if a cancellation arrived meanwhile, even if the call swallowed it."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
