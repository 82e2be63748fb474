"""Runs whose learner has several processes that share the model or its rows: they train, and recover from kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.os_process import is_alive
from tests.harness.forked import ForkServer
from tests.harness.processes import grandchildren
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.xdist_group("learner-ranks")]

MEGATRON = ("learner.backend=megatron", "learner.ranks=2", "checkpoint.every_steps=1")
LAYOUTS = ("learner.pipeline_parallel=2", "learner.context_parallel=2")


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest, megatron_forks: ForkServer) -> Iterator[RunProcess]:
    run = RunProcess(tmp_path, *MEGATRON, *request.param, forks=megatron_forks)
    run.start()
    yield run
    run.kill()


@pytest.mark.parametrize(
    "started",
    [(LAYOUTS[0], "run.steps=4", "weights.channel=objects"), (LAYOUTS[1], "run.steps=4")],
    indirect=True,
    ids=["stages, each of which stores its part", "context"],
)
def test_trains_its_steps_and_accounts_for_every_group(started: RunProcess) -> None:
    assert started.wait() == 0, started.said
    assert started.steps == 4
    found = started.audit()
    assert found["code"] == 0, found


@pytest.mark.parametrize("started", [(LAYOUTS[0],)], indirect=True, ids=["stages"])
@pytest.mark.parametrize(
    ("number", "end"),
    [
        pytest.param(signal.SIGKILL, "", id="killed"),
        pytest.param(signal.SIGSTOP, "learner has been ", id="stopped"),
    ],
)
async def test_killed_or_stopped_pipeline_stage_loses_no_group(
    started: RunProcess, megatron_forks: ForkServer, number: int, end: str
) -> None:
    """The learner's first process notices the failed communication between stages and ends. A stopped stage is named by
    the run as what the learner waits for, and the learner is restarted from its checkpoint."""
    await started.until(lambda: started.steps >= 2, "two steps")
    before = megatron_forks.children_of(started.pid)["learner"]
    (stage,) = grandchildren(before)
    reached = started.steps
    os.kill(stage, number)
    await started.until(
        lambda: megatron_forks.children_of(started.pid).get("learner", before) != before, "another learner"
    )
    assert end in started.said, started.said
    await started.until(lambda: not is_alive(stage), "the stage ends with the learner that started it")
    await started.until(lambda: started.steps >= reached + 2, "two more steps")
    assert await asyncio.to_thread(started.drain) == 130, started.said
    found = started.audit()
    assert found["code"] == 0, found
