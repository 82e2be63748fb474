"""A run whose model is ruined says so, in its rows and aloud; one that learns says nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asyncrl.data import demo_task
from tests.harness.learning import demo_run, memory_bus, train

NONE_OF_THE_MACHINE = ("metrics.drop_alarm=0", "metrics.straggler_alarm=0", "metrics.split_alarm=0")
"""Without alarms that a busy machine raises: answers come late there, and somebody waits."""


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_learning_rate_of_1000_is_loud_at_once(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    demo_task.write(tmp_path)
    staleness = "staleness.max_staleness=0" if mode == "sync" else "staleness.max_staleness=2"
    run = demo_run(tmp_path, "learner.learning_rate=1000", "learner.warmup_steps=0", "run.steps=6", staleness)
    with caplog.at_level(logging.WARNING, logger="asyncrl.metrics"):
        rows = await train(run, memory_bus())
    assert any(name in row for row in rows for name in ("alarm/diverged", "alarm/collapse"))
    assert any(" -> stop" in record.getMessage() for record in caplog.records)


async def test_a_run_that_learns_raises_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    demo_task.write(tmp_path)
    with caplog.at_level(logging.WARNING, logger="asyncrl.metrics"):
        rows = await train(demo_run(tmp_path, "run.steps=12", *NONE_OF_THE_MACHINE), memory_bus())
    assert not [name for row in rows for name in row if name.startswith("alarm/")]
    assert not caplog.records
