"""A learner with another layout takes over a running run of real processes, and is killed after that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from tests.harness.forked import ForkServer
from tests.harness.processes import grandchildren
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("learner-ranks")]


async def test_a_learner_of_two_ranks_takes_over_and_the_worker_never_stops(
    tmp_path: Path, forks: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunProcess(tmp_path, "learner.backend=megatron", forks=forks)
    run.start()
    try:
        await run.until(lambda: run.steps >= 2, "two steps")
        before = forks.children_of(run.pid)
        assert main(["swap", str(run.run_directory), "--set", "rollout.group_size=2"]) == 2
        assert "a swap changes what only the learner reads" in capsys.readouterr().err
        layout = ("--set", "learner.ranks=2", "--set", "learner.tensor_parallel=2")
        assert await asyncio.to_thread(main, ["swap", str(run.run_directory), *layout]) == 0
        assert "the new learner has taken over, and goes on from step" in capsys.readouterr().out
        swapped = run.steps
        await run.until(lambda: run.steps >= swapped + 2, "steps of the new learner")
        after = forks.children_of(run.pid)
        assert after["w0"] == before["w0"]
        (new,) = set(after.values()) - set(before.values())
        assert len(grandchildren(new)) == 1
        os.kill(new, signal.SIGKILL)
        swapped = run.steps
        await run.until(lambda: run.steps >= swapped + 2, "steps after a restart")
        assert await asyncio.to_thread(run.drain) == 130, run.said
        found = run.audit()
        assert found["code"] == 0, found
        begun = [json.loads(line) for line in (run.run_directory / "history.jsonl").read_text().splitlines()]
        layouts = [one["settings"]["learner"]["ranks"] for one in begun if one["kind"] == "begun"]
        assert layouts == [1, 2, 2]
    finally:
        run.kill()
