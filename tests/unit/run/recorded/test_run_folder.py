"""A renamed or copied folder stands for itself, not for the folder with the run's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import NoSuchRun
from asyncrl.run import registry
from asyncrl.run.processes.kept_files import AddressFile
from asyncrl.run.recorded.opened_run import open_run
from asyncrl.run.recorded.run_folder import RecordedRun, run_at

HERE: Any = SimpleNamespace(url="nats://127.0.0.1:1", token="n1's")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the run n1, which is up."""
    folder = tmp_path / "n1"
    folder.mkdir()
    settings = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}, "run": {"name": "n1"}}
    entry = {"kind": "begun", "incarnation": 0, "step": 0, "kept": 0, "max_staleness": 4, "settings": settings}
    (folder / "history.jsonl").write_text(json.dumps(entry) + "\n")
    AddressFile.of(folder, HERE).write()
    return folder


def address(folder: Path) -> tuple[str, str]:
    run = run_at(folder, [], verb="doctor")
    assert run.run.name == "n1"
    return registry.bus_address(run, token=run.bus.token)


def test_a_copy_of_a_run_that_is_up_is_not_up(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    with pytest.raises(NoSuchRun, match=r"copy/bus.json: was copied .* no `asyncrl run` is up in .*/copy; "):
        address(copy)
    assert RecordedRun(copy)._address_of_running() is None
    assert address(folder) == (HERE.url, HERE.token)


def test_a_copy_from_before_says_nothing_of_the_run_that_came_up_since(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    (copy / registry.BUS_FILE).unlink()
    with pytest.raises(NoSuchRun, match=r"no `asyncrl run` is up in .*/copy; "):
        address(copy)


def test_a_renamed_folder_is_opened_where_it_is(folder: Path) -> None:
    opened = open_run(folder.rename(folder.parent / "renamed"))
    assert opened.settings.run_directory == opened.folder.absolute() == folder.parent / "renamed"
    assert opened.settings.weights_directory == folder.parent / "renamed" / "weights"


def test_a_folder_that_was_renamed_is_where_its_own_address_says(folder: Path) -> None:
    assert address(folder.rename(folder.parent / "renamed")) == (HERE.url, HERE.token)
