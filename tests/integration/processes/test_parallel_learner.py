"""Runs whose learner has several processes that share the model or its rows: they train, and recover from a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from asyncrl.data.tiny_model import make_tiny_model
from tests import ROOT
from tests.harness.audits import audited
from tests.harness.command import asyncrl
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


def test_the_recipe_of_70b_trains_a_tiny_llama_in_its_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight ranks, four that share each layer in two stages, in turns with the engines, by adapters."""
    make_tiny_model(tmp_path / "model", architecture="llama", num_heads=8, num_kv_heads=4)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "label": "{n + 1}"}}\n' for n in range(9)))
    settings = {
        "run.steps": 2,
        "run.directory": tmp_path / "runs",
        "model.path": tmp_path / "model",
        "model.dtype": "float32",
        "data.path": tmp_path / "prompts.jsonl",
        "data.chat_template": "false",
        "reward.kind": "exact",
        "rollout.max_new_tokens": 4,
        "rollout.max_running": 16,
        "rollout.gpus": "[]",
        "engine.kind": "inprocess",
        "engine.options": "{threads = 1}",
        "engine.device": "cpu",
        "learner.device": "cpu",
        "learner.threads": 1,
        "learner.groups_per_batch": 2,
        "learner.lora.publish": "merged",
        "learner.options.offload_optimizer": "false",
        "algorithm.filters": "[]",
        "weights.directory": tmp_path / "weights",
        "checkpoint.every_steps": 1,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, _, err = asyncrl("run", ROOT / "examples" / "recipes" / "llama_70b.toml", *words, capsys=capsys)
    assert code == 0, err
    found = audited(tmp_path / "runs" / "llama_70b")
    assert (found["code"], found["steps"]) == (0, 2)
