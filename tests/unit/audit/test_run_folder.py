"""A renamed or copied folder stands for itself, not for the folder with the run's name."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.learner.history import sealed
from asyncrl.adapters import registry
from asyncrl.adapters.bus_file import BUS_FILE, write_address
from asyncrl.audit.opened_run import open_run
from asyncrl.audit.run_folder import run_at
from asyncrl.errors import NoSuchRun
from asyncrl.os_process import process_space

HERE: Any = SimpleNamespace(url="nats://127.0.0.1:1", token="n1's")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the run n1, which is up."""
    folder = tmp_path / "n1"
    folder.mkdir()
    settings = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}, "run": {"name": "n1"}}
    entry = {"kind": "begun", "incarnation": 0, "step": 0, "kept": 0, "max_staleness": 4, "settings": settings}
    (folder / "history.jsonl").write_bytes(sealed(entry))
    write_address(folder, url=HERE.url, token=HERE.token)
    return folder


def address(folder: Path) -> tuple[str, str]:
    run = run_at(folder, [], verb="doctor")
    assert run.run.name == "n1"
    return registry.bus_address(run, token=run.bus.token)


def test_copy_of_a_folder_does_not_say_that_the_run_is_up(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    (copy / BUS_FILE).unlink()
    with pytest.raises(NoSuchRun, match=r"no `asyncrl run` is up in .*/copy; "):
        address(copy)


def test_opens_a_renamed_folder(folder: Path) -> None:
    opened = open_run(folder.rename(folder.parent / "renamed"))
    assert opened.settings.run_directory == opened.folder.absolute() == folder.parent / "renamed"
    assert opened.settings.weights_directory == folder.parent / "renamed" / "weights"


def test_renamed_folder_of_a_running_run_keeps_its_address(folder: Path) -> None:
    assert address(folder.rename(folder.parent / "renamed")) == (HERE.url, HERE.token)


def test_killed_run_is_not_up_and_its_remedy_is_to_resume_it(folder: Path) -> None:
    """A killed `asyncrl run` leaves its address behind."""
    with subprocess.Popen(["true"]) as ended:
        pass
    file = folder / BUS_FILE

    def left_by(pid: int, url: str = HERE.url, *, host: str = process_space()) -> None:
        file.write_text(json.dumps({"url": url, "token": HERE.token, "pid": pid, "host": host}))

    left_by(ended.pid)
    with pytest.raises(NoSuchRun) as refused:
        address(folder)
    assert str(refused.value) == (
        f"{file}: `asyncrl run` (process {ended.pid}) was killed, and its nats-server is gone; continue with "
        "`asyncrl run FILE --resume` (until then `asyncrl audit`, `samples` and `board` read its folder)"
    )
    left_by(os.getpid())  # up, with a server that is starting again
    assert address(folder) == (HERE.url, HERE.token)
    left_by(ended.pid, host="node-7")  # a process of another machine that has the folder
    assert address(folder) == (HERE.url, HERE.token)
    with socket.create_server(("127.0.0.1", 0)) as server:  # a process of another container
        left_by(ended.pid, url := f"nats://127.0.0.1:{server.getsockname()[1]}")
        assert address(folder) == (url, HERE.token)
