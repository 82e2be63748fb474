"""A run file for the CLI, based on the demo task."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.data import demo_task
from tests.harness.command import RUN_FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its prompts."""
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


@pytest.fixture
def run_file(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(directory=folder))
    return path
