"""A run in the caller's own process: failures are in its result, cancellation drains it, and it leaves no trace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncrl
from asyncrl.data import demo_task
from tests import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


@pytest.fixture
def make_run(task: Path, tmp_path: Path) -> Callable[..., asyncrl.Run]:
    def made(**overrides: object) -> asyncrl.Run:
        table: dict[str, object] = {
            "bus.kind": "memory",
            "run.directory": str(tmp_path / "runs"),
            "model.path": str(task / "model"),
            "data.path": str(task / "prompts.jsonl"),
            "learner.backend": "reference",
            "learner.groups_per_batch": 2,
            "rollout.workers": 1,
            "metrics.console": False,
        }
        named = {key.replace("__", "."): value for key, value in overrides.items()}
        return asyncrl.Run.from_file(ROOT / "examples" / "demo.toml", overrides=table | named)

    return made


def logging_of_this_process() -> list[object]:
    root, ours = logging.getLogger(), logging.getLogger("asyncrl")
    return [*root.handlers, *ours.handlers, root.level, ours.level, ours.propagate, logging.raiseExceptions]


async def test_what_fails_later_is_in_the_result(make_run: Callable[..., asyncrl.Run]) -> None:
    before = logging_of_this_process()
    run = make_run(data__epochs=1, learner__groups_per_batch=33)  # of 32 prompts
    result = await run.train()
    assert result.reason.startswith("the data ended before one batch was full")
    assert (result.exit_code, result.steps, result.metrics) == (2, 0, {})
    assert logging_of_this_process() == before
    assert "the data ended before one batch was full" in (run.folder / "logs" / "run.log").read_text()


async def test_a_run_that_is_cancelled_is_drained(make_run: Callable[..., asyncrl.Run]) -> None:
    before = logging_of_this_process()
    run = make_run(run__steps=1_000_000)
    training = asyncio.create_task(run.train())
    while not (run.folder / "metrics.jsonl").exists():
        assert not training.done()
        await asyncio.sleep(0.02)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert list((run.folder / "checkpoints").glob("*"))
    assert logging_of_this_process() == before
