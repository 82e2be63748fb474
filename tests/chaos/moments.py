"""Waits for the moments of victims.py: during a checkpoint, between two renames of a folder, while starting."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from tests.chaos.seen import Seen
from tests.chaos.victims import Kind

MOMENT_SECONDS: Final = 15.0
"""Limit of the wait for a moment; after that the strike happens anyway."""


class Run(Protocol):
    """What a storm can observe of its run and do to it."""

    seen: Seen
    random: random.Random

    @property
    def run_directory(self) -> Path: ...

    def pids(self) -> dict[str, int]: ...

    def shoot(self, names: Sequence[str]) -> None: ...


class Moments:
    def __init__(self, run: Run) -> None:
        self._run = run

    async def of(self, kind: Kind, names: Sequence[str]) -> None:
        """Return at the kind's moment."""
        run = self._run
        checkpoints = run.run_directory / "checkpoints"
        if kind.moment == "after a step":
            step = run.seen.step
            await soon(lambda: run.seen.step > step)
        elif kind.moment == "writing a checkpoint":
            await asyncio.to_thread(_poll, lambda: _is_written(checkpoints), every=0.0005)
            await asyncio.sleep(run.random.uniform(0.0, 0.01))
        elif kind.moment == "renaming a checkpoint":
            await asyncio.to_thread(_poll, lambda: _is_written(checkpoints), every=0.0005)
            await asyncio.to_thread(_poll, lambda: not _is_written(checkpoints), every=0.0002)
        elif kind.moment == "writing weights":
            before = set((run.run_directory / "weights").glob("*"))
            await asyncio.to_thread(
                _poll, lambda: set((run.run_directory / "weights").glob("*")) != before, every=0.0002
            )
            await asyncio.sleep(run.random.uniform(0.0, 0.002))
        elif kind.moment == "after its publish":
            count = run.seen.published.get(names[0], 0)
            await soon(lambda: run.seen.published.get(names[0], 0) > count)
        elif kind.moment == "starting":
            pid = run.pids().get("learner")
            run.shoot(["learner"])
            await soon(lambda: run.pids().get("learner") not in (None, pid))
            await asyncio.sleep(run.random.uniform(0.0, 2.5))
        else:
            await asyncio.sleep(run.random.uniform(0.0, 1.5))


async def soon(is_so: Callable[[], bool]) -> None:
    """Wait until ``is_so`` is true, for at most MOMENT_SECONDS."""
    deadline = time.monotonic() + MOMENT_SECONDS
    while not is_so() and time.monotonic() < deadline:
        await asyncio.sleep(0.001)


def _is_written(checkpoints: Path) -> bool:
    return any(checkpoints.glob(".*.partial"))


def _poll(is_so: Callable[[], bool], *, every: float) -> None:
    deadline = time.monotonic() + MOMENT_SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(every)
