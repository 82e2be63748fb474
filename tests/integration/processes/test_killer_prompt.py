"""A prompt that kills its worker, with real processes: it fails after its last attempt, and the run continues."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.data import demo_task
from tests.harness.forked import LAUNCHER, ForkServer

RUN_FILE = """
[run]
name = "killer"
directory = "runs"
steps = 4
[bus]
ack_seconds = 2.0
[model]
path = "model"
[data]
path = "prompts.jsonl"
shuffle = false
[engine]
kind = "inprocess"
[reward]
kind = "asyncrl.data.demo_task:reward"
[learner]
backend = "reference"
groups_per_batch = 2
[rollout]
max_new_tokens = 8
group_size = 2
function = "killer:answer"
"""

KILLER = """
import os, signal
from asyncrl.environments.builtin import single_turn

async def answer(prompt, generate, *, index):
    if prompt.group_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return await single_turn(prompt, generate, index=index)
"""


@pytest.mark.slow
def test_prompt_that_kills_workers_fails_after_its_last_attempt(tmp_path: Path, forks: ForkServer) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "killer.py").write_text(KILLER)
    environment, said = os.environ | {"OMP_NUM_THREADS": "1"} | forks.environment, tmp_path / "said"
    command = ["run", "run.toml", "--set", LAUNCHER]
    ended = forks.run(command, environment=environment, output=said, directory=tmp_path)
    assert ended.wait(300) == 0, said.read_text()
    assert said.read_text().count("w0 ended with signal SIGKILL") == 3  # rollout.max_attempts
    log = (tmp_path / "runs" / "killer" / "logs" / "learner.log").read_text()
    assert log.count(" failed on w") == 1  # other groups that the worker held did not fail
    assert "group 1 failed on w0: gave up after 3 attempts: the last worker that tried did not come back" in log
    rows = [json.loads(line) for line in (tmp_path / "runs/killer/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["staleness/failed_groups"] == 1
