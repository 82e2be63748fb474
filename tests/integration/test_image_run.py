"""A run with images from its first kill to its branch."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config import RunConfig
from asyncrl.data import counting_task
from asyncrl.images.store import FOLDER
from asyncrl.rewards.port import Sample
from tests import ROOT
from tests.harness.audits import audited
from tests.harness.command import asyncrl
from tests.integration.test_audit import train_there
from tests.integration.undo.test_regrade import train_with_a_killed_worker


def length(sample: Sample) -> float:
    return float(len(sample.completion))


def settings(task: Path, *overrides: str) -> RunConfig:
    table = {
        "model.path": task / "model",
        "data.path": task / "prompts.jsonl",
        "run.directory": task / "runs",
        "run.name": "run",
        "run.steps": 2,
        "evaluation.every_steps": 0,
        "evaluation.datasets": [],
        "rollout.workers": 2,
        "rollout.group_size": 2,
        "learner.groups_per_batch": 2,
        "checkpoint.every_steps": 1,
        "checkpoint.keep_log": "true",
    }
    return config.load(
        ROOT / "examples" / "counting.toml", [*(f"{key}={value}" for key, value in table.items()), *overrides]
    )


async def begin(run: RunConfig) -> None:
    with EmbeddedServer(run.run_directory / "nats", run=run.run.name) as server:
        there = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url=server.url))
        bus = await registry.connect(there, token=server.token)
        try:
            await train_with_a_killed_worker(there, bus)
        finally:
            await bus.close()


def test_a_run_with_images_outlives_kills_and_is_audited_replayed_and_graded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counting_task.write(tmp_path, count=16)
    run = settings(tmp_path)
    folder, images = run.run_directory, run.run_directory / FOLDER
    asyncio.run(begin(run))
    away = images.rename(tmp_path / "away")  # what is still asked for is read again from the data
    train_there(settings(tmp_path, "run.steps=4"), resume=True)
    found = audited(folder)
    assert (found["clean"], found["steps"], found["failed"]) == (True, 4, 0)
    code, _, err = asyncrl("replay", folder, "--out", tmp_path / "without", capsys=capsys)
    assert (code, f"is nowhere: not in {images}; put the files of that folder back" in err) == (1, True), err
    shutil.copytree(away, images, dirs_exist_ok=True)
    code, said, err = asyncrl("replay", folder, "--out", tmp_path / "replay", capsys=capsys)
    assert (code, "4 steps, loss and gradient norm equal to the last bit" in said) == (0, True), err
    code, said, err = asyncrl("regrade", folder, "--reward", f"{__name__}:length", capsys=capsys)
    assert (code, "at step 4" in said) == (0, True), err
    code, said, err = asyncrl("replay", tmp_path / "runs" / "run-regraded", "--out", tmp_path / "graded", capsys=capsys)
    assert (code, "4 steps, loss and gradient norm equal to the last bit" in said) == (0, True), err
    code, said, err = asyncrl("samples", folder, "--limit", 1, capsys=capsys)
    assert (code, "[image " in said) == (0, True), err
