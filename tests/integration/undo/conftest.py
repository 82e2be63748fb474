"""A run that was graded wrong, for all tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from tests.integration.test_audit import train_there
from tests.integration.undo.runs import HERE, there


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undo")
    demo_task.write(folder)
    return folder


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def graded_wrong(task: Path) -> RunConfig:
    """Six steps with the wrong reward; as if killed before the checkpoint at 4 was written, after step 4."""
    threads = torch.get_num_threads()
    wrong = f"reward.kind={HERE}:wrong"
    train_there(there(task, task / "runs", wrong))
    shutil.rmtree(task / "runs" / "run" / "checkpoints" / "step-00000004")
    run = there(task, task / "runs", wrong, "run.steps=6")
    train_there(run, resume=True)
    torch.set_num_threads(threads)
    return run
