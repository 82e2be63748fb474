"""Workaround for ``wait_for`` of Python 3.11, which nats-py uses: it swallows a cancellation that races with a reply.

Remove this file with support for Python 3.11. Tests: test_a_cancellation_is_never_lost,
test_the_guard_notices_a_swallowed_cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def guarded(call: Awaitable[T]) -> T:
    """``await call``. Raises CancelledError if a cancellation arrived during the call, even if the call lost it."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
