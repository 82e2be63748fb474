"""What is read of a run's folder: metrics, samples, times, and whether the run is up."""

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

from asyncrl.actors.learner.history import seal
from asyncrl.adapters import registry
from asyncrl.adapters.bus_file import BUS_FILE, write_address
from asyncrl.audit.metric_rows import Row, parse, rows_of_newest_history
from asyncrl.audit.opened_run import open_run
from asyncrl.audit.run_folder import run_at
from asyncrl.audit.samples import RunSamples
from asyncrl.audit.timeline import TIMELINE_FILE, newest_rows
from asyncrl.cli import main
from asyncrl.cli.audit import table
from asyncrl.errors import NoSuchRun
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.os_process import process_space
from asyncrl.policies.audit.accounting import account
from tests.harness import buses, contract_adapters
from tests.harness.learning import memory_bus

HERE: Any = SimpleNamespace(url="nats://127.0.0.1:1", token="n1's")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the run n1, which is up."""
    folder = tmp_path / "n1"
    folder.mkdir()
    settings = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}, "run": {"name": "n1"}}
    entry = {"kind": "begun", "incarnation": 0, "step": 0, "kept": 0, "max_staleness": 4, "settings": settings}
    (folder / "history.jsonl").write_bytes(seal(entry))
    write_address(folder, url=HERE.url, token=HERE.token, worker_token="theirs")
    return folder


def address(folder: Path) -> tuple[str, str]:
    run = run_at(folder, [], verb="doctor")
    assert run.run.name == "n1"
    return registry.bus_address(run, token=run.bus.token)


def test_copy_of_a_folder_does_not_say_that_the_run_is_up(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    (copy / BUS_FILE).unlink()
    with pytest.raises(NoSuchRun, match=r"copy: the run is over, or was stopped; `asyncrl samples "):
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


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{", b"[]", b"3", b"null", b"\xff", b"\0" * 9, b"[" * 10_000),
        *(b"{}", b'{"step": "3"}', b'{"step": 3.0}', b'{"step": -1}', b'{"step": true}', b'{"step": null}'),
        *(b'{"step": 3, "loss": NaN}', b'{"step": 3, "loss": 1e999}', b'{"step": 3, "x": -Infinity}'),
        *(b'{"step": 3, "x": 1' + b"0" * 400 + b"}", b'{"step": 3, "x": ' + b"9" * 5000 + b"}"),
        *(b'{"step": 3, "learner/incarnation": "a"}', b'{"step": 3, "learner/incarnation": -1}'),
        b'\xef\xbb\xbf{"step": 3',
    ],
)
def test_other_text_is_no_row(line: bytes) -> None:
    assert parse(line) is None


def _trained(incarnation: int, step: int) -> Row:
    return {"step": step, "learner/incarnation": incarnation, "loss": 0.1 * incarnation}


def _evaluated(incarnation: int, step: int) -> Row:
    return {"step": step, "learner/incarnation": incarnation, "evaluation/complete": 1.0, "evaluation/a/mean@1": 0.5}


def _by_key(*rows: Row) -> dict[tuple[int, int], Row]:
    return {(row["learner/incarnation"], row["step"]): row for row in rows}


def test_retrained_step_replaces_it_and_all_later_steps() -> None:
    rows = _by_key(*(_trained(0, step) for step in (1, 2, 3, 4)), _trained(1, 3))
    assert rows_of_newest_history(rows) == [_trained(0, 1), _trained(0, 2), _trained(1, 3)]


def test_evaluation_of_a_resumed_version_joins_the_row_of_its_step() -> None:
    rows = _by_key(_trained(0, 1), _trained(0, 2), _evaluated(1, 2), _trained(1, 3))
    assert rows_of_newest_history(rows) == [_trained(0, 1), _evaluated(1, 2) | _trained(0, 2), _trained(1, 3)]


def test_evaluation_before_the_first_step_has_its_own_row() -> None:
    rows = _by_key(_evaluated(0, 0), _trained(0, 1))
    assert rows_of_newest_history(rows) == [_evaluated(0, 0), _trained(0, 1)]


def test_steps_stay_until_they_are_retrained() -> None:
    rows = _by_key(*(_trained(0, step) for step in (1, 2, 3)), _evaluated(1, 1))
    assert [row["step"] for row in rows_of_newest_history(rows)] == [1, 2, 3]
    rows |= _by_key(_trained(1, 2))
    assert rows_of_newest_history(rows) == [_evaluated(1, 1) | _trained(0, 1), _trained(1, 2)]


GROUP, LOAD, WAIT = [12, "w0", 0.5, 1.0, 2, 0.1, 3.5], ["w0", 6, 1.5, 0.5, 0.1], ["w0", "prompts", "learner", 1.0]
ROW: dict[str, Any] = {
    **{"step": 7, "incarnation": 0, "time": 9.5, "seconds": {"wait": 0.1}},
    **{"groups": [GROUP], "loads": [LOAD], "waits": [WAIT]},
}


def rows(folder: Path, row: Any) -> int:
    (folder / TIMELINE_FILE).write_text(json.dumps(row) + "\n")
    return len(newest_rows(folder, most_bytes=2**20))


def test_reads_a_whole_row(tmp_path: Path) -> None:
    assert rows(tmp_path, ROW) == 1
    assert rows(tmp_path, ROW | {"groups": [], "loads": [], "waits": []}) == 1


@pytest.mark.parametrize(
    "change",
    [
        *({"step": "7"}, {"step": 1.0}, {"time": None}, {"time": float("nan")}, {"time": 10**400}),
        *({"seconds": []}, {"seconds": {"wait": "x"}}, {"seconds": {"wait": float("inf")}}),
        *({"groups": None}, {"groups": [GROUP[:6]]}, {"groups": [[*GROUP[:6], "x"]]}, {"groups": [["12", *GROUP[1:]]]}),
        *({"loads": [3]}, {"loads": [[0, *LOAD[1:]]]}, {"waits": [["w0", "prompts", None, 1.0]]}, {"waits": {"a": 1}}),
    ],
)
def test_skips_rows_of_another_shape(change: dict[str, Any], tmp_path: Path) -> None:
    assert rows(tmp_path, ROW | change) == 0


def test_unreadable_file_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / TIMELINE_FILE).mkdir()
    assert main.main(["trace", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert TIMELINE_FILE in told and "cannot be read: Is a directory" in told
    assert len(told.splitlines()) == 1


async def test_tells_a_trimmed_log_from_an_empty_one(tmp_path: Path) -> None:
    samples, bus = RunSamples(contract_adapters.run_of(directory=tmp_path), None, token=""), memory_bus()
    assert [one async for one in samples.read_log(bus)] == []
    assert samples.why_no_log == "its log is empty: no group has arrived yet"
    await bus.publish(TRAJECTORIES, buses.group(0), key="0")
    await bus.trim(TRAJECTORIES, through=1)
    assert [one async for one in samples.read_log(bus)] == []
    assert "trimmed unless checkpoint.keep_log = true" in samples.why_no_log


def test_audit_says_that_nothing_was_recorded() -> None:
    made = account([], saved=None, bus=None)
    assert table(made, Path("runs/one")).splitlines()[-1] == "nothing is recorded yet: no learner has begun"
