"""A learner whose ranks are separate processes, as on several machines: any rank may die, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.actors.learner import checkpoint
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("learner-ranks")]


@pytest.fixture
def run(tmp_path: Path, megatron_forks: ForkServer) -> Iterator[RunProcess]:
    made = RunProcess(
        tmp_path,
        "learner.backend=megatron",
        "learner.ranks=2",
        "learner.machines=2",
        "checkpoint.every_steps=2",
        "run.steps=20",
        forks=megatron_forks,
    )
    yield made
    made.kill()


@pytest.mark.parametrize(
    ("struck", "number", "end"),
    [
        pytest.param("learner-1", signal.SIGKILL, "its connection has ended", id="rank"),
        pytest.param("learner", signal.SIGKILL, "", id="learner"),
    ],
)
async def test_learner_continues_from_its_checkpoint_when_a_rank_is_killed(
    run: RunProcess, megatron_forks: ForkServer, struck: str, number: int, end: str
) -> None:
    """For whole machines and all moments, see python -m tests.chaos --faults ranks."""
    run.start()
    saved = run.run_directory / "checkpoints"
    await run.until(lambda: run.steps >= 4 and checkpoint.latest(saved), "four steps, and a checkpoint", seconds=1200)
    os.kill(megatron_forks.children_of(run.pid)[struck], number)
    await run.until(lambda: "resumed at step" in run.said, "the learner is back", seconds=1200)
    assert await asyncio.to_thread(run.wait, 600) == 0, run.said
    if end:
        assert re.search(rf"learner rank 1 on \S+ \(pid \d+\) is gone: {end}", run.said), run.said
    found = await asyncio.to_thread(run.audit)
    assert found["code"] == 0, found
