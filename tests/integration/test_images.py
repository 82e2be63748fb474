"""A run of an agent that is shown images, over two turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import asyncrl
from asyncrl.data import counting_task
from tests import ROOT


@pytest.mark.slow
async def test_an_agent_is_shown_another_image_and_both_turns_are_trained(tmp_path: Path) -> None:
    """Learner and engine agree on the logprobs of the second turn, so they saw the same image there."""
    await asyncio.to_thread(counting_task.write, tmp_path, count=8)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    for row in rows:
        row["metadata"] = {"next": str(tmp_path / rows[0]["images"][0])}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = asyncrl.Run.from_file(
        ROOT / "examples" / "counting.toml",
        overrides={
            "run.directory": str(tmp_path / "runs"),
            "run.steps": 1,
            "bus.kind": "memory",
            "model.path": str(tmp_path / "model"),
            "data.path": str(tmp_path / "prompts.jsonl"),
            "evaluation.datasets": [],
            "evaluation.every_steps": 0,
            "learner.groups_per_batch": 2,
            "rollout.group_size": 2,
            "rollout.max_new_tokens": 4,
            "rollout.function": "agent",
            "rollout.options": {
                "harness": "tests.harness.looking_agent:play",
                "timeout_seconds": 300.0,
                "harness_options": {"processes": 1, "directory": str(ROOT)},
            },
            "reward.kind": "none",
            "metrics.console": False,
        },
    )
    result = await run.train()
    assert (result.reason, result.steps) == ("done", 1)
    assert result.metrics["rollout/turns_mean"] == 2.0
    assert result.metrics["length/observed_mean"] > 4  # the placeholders of an image, and "now"
    assert result.metrics["mismatch/fresh_mean"] < 1e-4
