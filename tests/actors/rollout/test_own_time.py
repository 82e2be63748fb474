"""A rollout function's time limit counts only its own time, not its waits for the engine."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncrl.actors.rollout.generation_session import OwnTime


async def test_a_function_that_never_returns_is_ended() -> None:
    own = OwnTime(0.01)
    with pytest.raises(TimeoutError):
        async with own.limited():
            await asyncio.Event().wait()
    assert own.is_over


async def test_waiting_for_the_engine_costs_nothing_however_calls_overlap() -> None:
    own, loop = OwnTime(3600.0), asyncio.get_running_loop()
    async with own.limited():
        assert own._timeout is not None
        with own.paused():
            assert own._timeout.when() is None
            with own.paused():
                pass
            assert own._timeout.when() is None
        assert 0 < (own._timeout.when() or math.inf) - loop.time() <= 3600.0


async def test_the_time_before_a_wait_counts_behind_it() -> None:
    own = OwnTime(3600.0)
    async with own.limited():
        assert own._timeout is not None
        own._timeout.reschedule(asyncio.get_running_loop().time() + 5.0)  # leave only five seconds of the limit
        with own.paused():
            pass
        assert (own._timeout.when() or math.inf) <= asyncio.get_running_loop().time() + 5.0


async def test_without_a_limit_nothing_is_ended() -> None:
    own = OwnTime(0.0)
    async with own.limited():
        with own.paused():
            await asyncio.sleep(0)
    assert not own.is_over


async def test_a_timeout_of_the_functions_own_is_not_ours() -> None:
    own = OwnTime(3600.0)
    with pytest.raises(TimeoutError):
        async with own.limited():
            raise TimeoutError
    assert not own.is_over


async def test_a_call_that_its_function_left_behind_ends_in_peace() -> None:
    own, left = OwnTime(3600.0), asyncio.Event()

    async def call() -> str:
        with own.paused():
            await left.wait()
        return "answered"

    async with own.limited():
        behind = asyncio.create_task(call())
        await asyncio.sleep(0)
    left.set()
    assert await behind == "answered"
    assert await call() == "answered"
