"""Turns to load weights: a worker that never gives up its turn delays the others only for a while."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.actors.rollout import load_turns
from asyncrl.actors.rollout.load_turns import FIRST_SECONDS, LEAST_SECONDS, patience, turn_to_load
from asyncrl.bus.port import Bus


async def test_a_turn_that_never_comes_is_not_waited_for_for_ever(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_turns, "FIRST_SECONDS", 0.05)
    async with bus.lease("load-0", holder="liar"), turn_to_load(bus, worker="w0", num_engines=1):
        assert "its turn to load weights (load-0) did not come" in caplog.text


async def test_a_turn_is_waited_for(bus: Bus) -> None:
    entered = asyncio.Event()

    async def wait() -> None:
        async with turn_to_load(bus, worker="w0", num_engines=1):
            entered.set()

    async with asyncio.TaskGroup() as group, bus.lease("load-0", holder="w1"):
        group.create_task(wait())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not entered.is_set()
    assert entered.is_set()


def test_patience_goes_by_what_a_load_takes() -> None:
    assert patience(0.0) == FIRST_SECONDS  # the load time is not known yet
    assert patience(0.5) == LEAST_SECONDS
    assert patience(60.0) == 1200.0
