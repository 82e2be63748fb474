"""Full and read-only disks under a run of real processes: the run waits, reports it, continues, and loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.messages.topics import ACTORS
from tests.chaos.run_files import CALM
from tests.chaos.storm import Storm
from tests.chaos.test_trouble import assert_is_clean, disk_of
from tests.harness.faults.injections import FILLER, fill, full_disk
from tests.harness.forked import ForkServer
from tests.harness.run_process import within

pytestmark = pytest.mark.slow

CANNOT, WAS = "cannot be written", "was written after"


async def waits_out(
    trouble: contextlib.AbstractContextManager[object],
    storm: Storm,
    seen: Any,
    *,
    what: str = "",
    is_mute: bool = False,
) -> None:
    """During the trouble, the learner waits for a disk and reports it. Afterwards it continues without a restart.

    what  what the learner cannot write; "" if any write may come first
    """
    before, behind = storm.pids(), len(storm.output)  # the learner says it once, maybe while the disk is being filled
    with trouble:
        if not is_mute:
            await storm.until(lambda: f"{what} {CANNOT}" in storm.output[behind:], "the learner says so")
        async with within("the learner's heartbeat says so"):
            while not await _says_so(storm):
                await asyncio.sleep(0.1)
        alarm = "has been waiting for a disk that cannot be written"
        await storm.until(lambda: alarm in storm.output[behind:], "and the monitor")
    steps = seen.step
    await storm.until(lambda: f"{what} {WAS}" in storm.output[behind:] and seen.step > steps, "it goes on")
    await storm.until(lambda: seen.step[1] > steps[1] + 5, "all work again")
    assert storm.pids() == before
    assert seen.step[0] == 0  # the same incarnation


async def _says_so(storm: Storm) -> bool:
    assert storm.bus is not None
    beat = (await storm.bus.states(ACTORS)).get("learner")
    return beat is not None and any(wait.on == "room" for wait in beat.waits)


async def test_a_learner_whose_files_cannot_grow_waits(tmp_path: Path, forks: ForkServer) -> None:
    """None of the learner's files can grow, including its output to the run.

    It fails first on its history, or on its metrics if the limit starts between the two. It publishes nothing that is
    not on record.
    """
    storm = Storm(tmp_path, seed=1, overrides=("run.stall_seconds=10", CALM), forks=forks)
    async with storm.up() as seen:
        await waits_out(full_disk(storm.pids()["learner"]), storm, seen, is_mute=True)
    audit = await asyncio.to_thread(storm.audit)
    assert_is_clean(audit)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    fill(disk)
    yield
    (disk / FILLER).unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    for mode in ("ro", "rw"):
        while subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=False).returncode:
            time.sleep(0.05)  # busy: a file is being written
        if mode == "ro":
            yield


async def test_disks_under_checkpoints_and_weights_are_waited_for(tmp_path: Path, forks: ForkServer) -> None:
    """First one is full, then the other one is read-only."""
    storm = Storm(tmp_path, seed=1, overrides=("run.stall_seconds=10", CALM), forks=forks)
    folder = storm.run_directory
    with disk_of(folder / "checkpoints", megabytes=16) as first, disk_of(folder / "weights", megabytes=16) as other:
        async with storm.up() as seen:
            await waits_out(full(first), storm, seen, what="a checkpoint")
            await waits_out(read_only(other), storm, seen, what="weights")
        audit = await asyncio.to_thread(storm.audit)
    assert_is_clean(audit)
