"""Shadows of a running run of real processes: what they train, and one that becomes its learner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asyncrl.actors.learner import checkpoint
from asyncrl.cli.main import main
from asyncrl.tensors.weight_files import paths
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = pytest.mark.slow


def rows(folder: Path) -> dict[int, dict[str, float]]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    return {row["step"]: row for row in map(json.loads, (line for line in lines if line.endswith("\n")))}


async def test_a_shadow_trains_what_the_run_trains_and_takes_over(
    tmp_path: Path, forks: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One shadow changes nothing: its losses are the run's to the last bit. The other one is promoted."""
    run = RunProcess(tmp_path, "checkpoint.every_steps=2", forks=forks)
    run.start()
    try:
        await run.until(lambda: run.steps >= 2, "two steps")
        directory = run.run_directory
        same, fast = directory / "shadows" / "same", directory / "shadows" / "fast"
        changed = ("--set", "learner.learning_rate=1e-3")
        shadows = [run.beside("shadow", str(directory), "--name", *words) for words in (("same",), ("fast", *changed))]
        await run.until(lambda: len(rows(same)) >= 3 and len(rows(fast)) >= 3, "steps of the shadows")
        assert await asyncio.to_thread(main, ["promote", str(directory), "fast"]) == 0
        assert "the new learner has taken over" in capsys.readouterr().out
        assert await asyncio.to_thread(shadows[1].wait, 100) == 0
        state = max((fast / "states").iterdir())
        step = int(state.name.partition("-")[2])
        folder = directory / "checkpoints" / f"step-{step:08d}-epoch-1"
        joined = checkpoint.read(folder, whole=True)[0]
        assert (joined.step, joined.resume_points) == (step, {1: step - 1})
        assert (folder / "backend" / "state.safetensors").read_bytes() == (state / "state.safetensors").read_bytes()
        await run.until(lambda: run.steps >= step + 2, "steps of the promoted learner")
        await run.until(lambda: len(set(rows(same)) & set(rows(directory)) - {*range(step + 1)}) >= 1, "another step")
        assert await asyncio.to_thread(run.drain) == 130, run.said
        of_run = rows(directory)
        for number in set(rows(same)) & {one for one in of_run if one <= step}:
            assert rows(same)[number]["loss"] == of_run[number]["loss"]
        assert await asyncio.to_thread(shadows[0].wait, 100) == 0
        found = run.audit()
        assert found["code"] == 0, found
        begun = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
        rates = [one["settings"]["learner"]["learning_rate"] for one in begun if one["kind"] == "begun"]
        assert rates == [rates[0], rates[0], 1e-3] and rates[0] != 1e-3
        assert "trainer and engine disagree" not in run.said
        assert paths(max((fast / "weights").iterdir()))
    finally:
        run.kill()
