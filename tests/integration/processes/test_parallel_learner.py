"""Runs whose learner has several processes that share the model or its rows: they train, and recover from a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.harness.forked import ForkServer
from tests.harness.processes import grandchildren
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("learner-ranks")]


async def test_killed_pipeline_stage_loses_no_group(tmp_path: Path, forks: ForkServer) -> None:
    """Each stage stores its part of the weights on the bus. The learner's first process notices that communication
    between the stages has failed, and ends."""
    layout = ("learner.backend=megatron", "learner.ranks=2", "learner.pipeline_parallel=2", "weights.channel=objects")
    run = RunProcess(tmp_path, *layout, "checkpoint.every_steps=1", forks=forks)
    run.start()
    try:
        await run.until(lambda: run.steps >= 2, "two steps")
        before = forks.children_of(run.pid)["learner"]
        (stage,) = grandchildren(before)
        reached = run.steps
        os.kill(stage, signal.SIGKILL)
        await run.until(lambda: forks.children_of(run.pid).get("learner", before) != before, "another learner")
        await run.until(lambda: run.steps >= reached + 2, "two more steps")
        assert await asyncio.to_thread(run.drain) == 130, run.said
        found = run.audit()
        assert found["code"] == 0, found
    finally:
        run.kill()
