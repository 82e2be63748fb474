"""A rollout function's time limit counts only its own time, not its waits for the engine."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncrl.actors.rollout.generation_session import OwnTime


async def test_ends_function_that_never_returns() -> None:
    own = OwnTime(0.01)
    with pytest.raises(TimeoutError):
        async with own.limit():
            await asyncio.Event().wait()
    assert own.is_over


async def test_waits_for_the_engine_do_not_count() -> None:
    own, loop = OwnTime(3600.0), asyncio.get_running_loop()
    async with own.limit():
        assert own._timeout is not None
        with own.pause():
            assert own._timeout.when() is None
            with own.pause():
                pass
            assert own._timeout.when() is None
        assert 0 < (own._timeout.when() or math.inf) - loop.time() <= 3600.0


async def test_timeout_inside_the_function_is_not_ours() -> None:
    own = OwnTime(3600.0)
    with pytest.raises(TimeoutError):
        async with own.limit():
            raise TimeoutError
    assert not own.is_over


async def test_call_left_running_by_its_function_ends_normally() -> None:
    own, left = OwnTime(3600.0), asyncio.Event()

    async def call() -> str:
        with own.pause():
            await left.wait()
        return "answered"

    async with own.limit():
        behind = asyncio.create_task(call())
        await asyncio.sleep(0)
    left.set()
    assert await behind == "answered"
    assert await call() == "answered"
