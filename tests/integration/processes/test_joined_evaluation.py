"""A worker that joins a run by hand answers evaluations besides training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = pytest.mark.slow


def results(run: RunProcess) -> list[dict[str, Any]]:
    """Return the evaluation results so far."""
    file = run.run_directory / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "evaluation/complete" in row]


async def test_joined_workers_evaluate(tmp_path: Path, forks: ForkServer) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    away.mkdir()
    path = f'path = "{here}/prompts.jsonl", samples = 2, limit = 8'
    run = RunProcess(
        here,
        "rollout.workers=0",
        "evaluation.every_steps=2",
        f'evaluation.datasets=[{{name = "prompts", {path}, reward = {{kind = "exact"}}}}]',
        name="evaluated",
        forks=forks,
    )
    run.start()
    worker = None
    try:
        async with run.heard():
            await run.until(lambda: "nats-server on" in run.said, "its bus")
            worker = run.join("guest", folder=away)
            await run.until(lambda: len(results(run)) > 1, "two evaluations")
            assert await asyncio.to_thread(run.drain) == 130
        for row in results(run)[:2]:
            assert row["evaluation/complete"] == 1.0
            assert 0 < row["evaluation/engine_share"] <= 1
            assert row["evaluation/prompts/prompts"] == 8
        found = run.audit()
        assert (found["code"], found["lost"], found["evaluation_problems"]) == (0, 0, 0)
    finally:
        run.kill()
        if worker is not None:
            worker.kill()
            worker.wait()
