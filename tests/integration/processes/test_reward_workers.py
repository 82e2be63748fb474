"""A run with reward workers and a slow reward: one is killed, another grades its groups, and engines keep
generating."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.adapters import registry
from asyncrl.messages import Heartbeat
from asyncrl.messages.topics import ACTORS
from tests.harness.forked import ForkServer
from tests.harness.run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SLOW = """
import asyncio, hashlib, json, os, sys
from asyncrl.data import demo_task

async def judge(samples):
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.prompt_tokens.tobytes() + sample.trajectory.tokens.tobytes())
        digest.update(sample.trajectory.behavior_logprobs.tobytes())
    note("begun", digest)
    await asyncio.sleep(2.0)
    note("graded", digest)
    return [demo_task.reward(sample) for sample in samples]

def note(what, digest):
    with open(os.environ["JUDGED"], "a") as file:
        by = "reward-worker" if "reward-worker" in sys.argv else "rollout-worker"
        file.write(json.dumps({"what": what, "group": digest.hexdigest(), "pid": os.getpid(), "by": by}) + "\\n")
"""
REWARD = ("reward.kind=slow:judge", "reward.workers=2", "reward.at_once=4")


@pytest.fixture
def run(tmp_path: Path, forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunProcess]:
    """One worker with slots for two groups of four. The reward takes two seconds and also grades evaluations."""
    monkeypatch.setenv("JUDGED", str(tmp_path / "judged.jsonl"))
    data = f'evaluation.datasets=[{{name = "prompts", path = "{tmp_path}/prompts.jsonl", limit = 8}}]'
    made = RunProcess(tmp_path, *REWARD, "evaluation.every_steps=2", data, name="graded", forks=forks)
    (tmp_path / "slow.py").write_text(SLOW)
    yield made
    made.kill()


async def test_a_killed_reward_worker_loses_nothing_and_a_slow_judge_holds_no_engine(
    run: RunProcess, tmp_path: Path
) -> None:
    run.start()
    await run.until(lambda: run.steps >= 1, "a step")
    killed = (await beats(run))["r0"].pid
    await run.until(lambda: open_of(judged(tmp_path), killed) >= 2, "groups in the hands of r0")
    os.kill(killed, signal.SIGKILL)
    left = {one["group"] for one in judged(tmp_path) if one["pid"] == killed}
    left -= {one["group"] for one in judged(tmp_path) if one["what"] == "graded"}
    steps = run.steps
    await run.until(lambda: run.steps >= steps + 3, "steps without it")
    far = tmp_path / "far"
    far.mkdir()
    (far / "slow.py").write_text(SLOW)
    joined = run.join("far", "--allow", "slow", "--set", "reward.options={}", folder=far, verb="reward-worker")
    await run.until(lambda: open_of(judged(tmp_path), joined.pid), "a group in the hands of who has joined")
    joined.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(joined.wait, 60) == 0
    assert open_of(judged(tmp_path), joined.pid) == 0
    for wanted in (3, 1):
        scaled = await asyncio.to_thread(run.scale, 1, "--reward-workers", str(wanted))
        assert (scaled.returncode, scaled.stderr) == (0, "")
        assert f"run graded: 1 rollout workers and {wanted} reward workers after" in scaled.stdout
    assert "2 -> 3 reward workers: + r2" in run.said and "3 -> 1 reward workers: - r1, r2" in run.said
    assert "r1 has left" in run.said and "r2 has left" in run.said

    answering = (await beats(run))["w0"].pid  # this process grades its own evaluation answers
    await run.until(lambda: open_of(judged(tmp_path), answering), "an evaluation that is graded")
    evaluated = len(evaluations(run))
    os.kill(answering, signal.SIGKILL)
    await run.until(lambda: len(evaluations(run)) > evaluated, "the evaluation without it")
    assert await asyncio.to_thread(run.drain) == 130
    assert "r0 ended with signal SIGKILL" in run.said and "restart 1 of" in run.said

    assert set(evaluations(run)) == {1.0}, "each is complete"
    notes = [one for one in judged(tmp_path) if one["by"] == "reward-worker"]
    # The killed one may have graded a group and not acked it. The other one grades it again, which is harmless.
    graded = Counter(one["group"] for one in notes if one["what"] == "graded" and one["pid"] != killed)
    assert left and left <= graded.keys()
    assert set(graded.values()) == {1}
    in_hands = most = 0
    for one in notes:
        in_hands += {"begun": 1, "graded": -1}[one["what"]]
        most = max(most, in_hands)
    assert most > 4, "more groups than there are slots for, and twice that"
    found = run.audit()
    assert (found["code"], found["lost"], found["duplicated"], found["failed"]) == (0, 0, 0, 0)
    assert found["evaluation_problems"] == 0


def evaluations(run: RunProcess) -> list[float]:
    """Return the completed fraction of each evaluation that has a result."""
    rows = (run.run_directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(row) for row in rows if row.endswith("\n")]
    return [row["evaluation/complete"] for row in found if "evaluation/complete" in row]


def judged(folder: Path) -> list[dict[str, str | int]]:
    path = folder / "judged.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def open_of(notes: list[dict[str, str | int]], pid: int) -> int:
    """Return the number of groups that the process has begun but not graded."""
    return sum({"begun": 1, "graded": -1}[str(one["what"])] for one in notes if one["pid"] == pid)


async def beats(run: RunProcess) -> dict[str, Heartbeat]:
    bus = await registry.observe(run.config(), token=run.token)
    try:
        return await bus.states(ACTORS)
    finally:
        await bus.close()
