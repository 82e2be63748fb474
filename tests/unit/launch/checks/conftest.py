"""A run file based on the demo task."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.data import demo_task
from tests.unit.launch.checks.test_run_file import RUN_FILE


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    demo_task.write(folder)
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(folder=folder))
    return path
