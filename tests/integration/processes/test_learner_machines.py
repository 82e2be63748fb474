"""A learner whose ranks are separate processes, as on several machines: any rank may die, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from asyncrl.actors.learner import checkpoint
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("learner-ranks")]


async def test_learner_continues_from_its_checkpoint_when_a_rank_is_killed_and_then_the_first_one(
    tmp_path: Path, forks: ForkServer
) -> None:
    """For whole machines and all moments, see python -m tests.chaos --faults ranks."""
    layout = ("learner.backend=megatron", "learner.ranks=2", "learner.machines=2")
    run = RunProcess(tmp_path, *layout, "checkpoint.every_steps=2", forks=forks)
    run.start()
    try:
        saved = run.run_directory / "checkpoints"
        for times, struck in ((1, "learner-1"), (2, "learner")):
            steps = run.steps
            await run.until(lambda steps=steps: run.steps >= steps + 4 and checkpoint.latest(saved), "four steps")
            os.kill(forks.children_of(run.pid)[struck], signal.SIGKILL)
            await run.until(lambda times=times: run.said.count("resumed at step") == times, "the learner is back")
        last = run.steps
        await run.until(lambda: run.steps != last, "a step: both ranks are back")  # a drain before that ends in minutes
        gone = r"learner rank 1 on \S+ \(pid \d+\) is gone: its connection has ended"
        assert re.search(gone, run.said), run.said
        assert await asyncio.to_thread(run.drain) == 130, run.said
        found = await asyncio.to_thread(run.audit)
        assert found["code"] == 0, found
    finally:
        run.kill()
