"""Whatever is damaged in a run's folder, commands that read it report it in lines and end with their exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncrl as api
from asyncrl.actors.learner import checkpoint
from asyncrl.board.feed import Readers, RunFeed
from asyncrl.board.group_index import rows_as_json
from asyncrl.board.watched_run import WatchedRun
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.errors import AsyncRLError
from tests.harness.command import asyncrl
from tests.harness.damage import spoil
from tests.harness.learning import demo_run
from tests.integration.test_audit import train_there


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Four steps on its own nats-server, with checkpoints at 2 and 4."""
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("damaged")
    demo_task.write(folder)
    made = demo_run(folder, "checkpoint.every_steps=2")
    train_there(made)
    torch.set_num_threads(threads)
    return made


@pytest.fixture(scope="module")
def quiet(run: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder without its bus, so that reading it starts no server."""
    copy = tmp_path_factory.mktemp("quiet") / "run"
    shutil.copytree(run.run_directory, copy, ignore=shutil.ignore_patterns("nats", "weights", "logs"))
    return copy


def flipped(path: Path, *, bit: int = 0x80) -> None:
    data = bytearray(path.read_bytes())
    for part in (3, 5, 9):
        data[len(data) * part // 10] ^= bit
    path.write_bytes(data)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "flipped": flipped,
    "one bit flipped": lambda path: flipped(path, bit=1),
    "emptied": lambda path: os.truncate(path, 0),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "gone": Path.unlink,
    "a folder": a_folder,
    "unreadable": lambda path: path.chmod(0),
    "other JSON": lambda path: path.write_text('[1, {"a": null}]\n3\n"x"\n{"step": "a"}\n{"kind": []}\nnull\n'),
}
FILES = [
    "history.jsonl",
    "metrics.jsonl",
    *(f"checkpoints/step-0000000{step}/{name}" for step in (2, 4) for name in ("learner.json", "manifest.json")),
    "checkpoints/step-00000004/backend/state.safetensors",
]


def look(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, str]]:
    """Return each command's exit code and output. A traceback or an unexpected exception fails the test."""
    said = {}
    for words in (["audit"], ["audit", "--json"], ["top", "--once"], ["doctor"], ["replay"]):
        code, out, err = asyncrl(words[0], str(folder), *words[1:], capsys=capsys)
        assert "Traceback" not in out + err
        assert len(err.splitlines()) <= 1, err
        assert code in (0, 1, 2)
        assert code or not err
        said[" ".join(words)] = (code, out + err)
    try:
        opened = api.open_run(folder)
        rows = list(opened.metrics()), list(opened.groups())
        said["open_run"] = (0, f"{len(rows[0])} metrics, {len(rows[1])} groups")
    except AsyncRLError as error:
        assert "\n" not in str(error)
        said["open_run"] = (2, str(error))
    return said


@pytest.fixture
def copy(quiet: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(quiet, tmp_path / "run"))


def test_a_whole_folder_is_clean(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = look(copy, capsys)
    assert {name: code for name, (code, _) in said.items()} == {
        "audit": 0,
        "audit --json": 0,
        "top --once": 2,
        "doctor": 2,
        "replay": 2,
        "open_run": 0,
    }
    assert said["audit"][1].endswith(
        "\nbus: not asked (nothing is left of its log: the store of its bus is not there)\nclean\n"
    )
    assert json.loads(said["audit --json"][1])["bus_not_asked"].startswith("nothing is left of its log")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_ends_a_command_with_a_traceback(
    copy: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    DAMAGES[damage](copy / name)
    code, out = look(copy, capsys)["audit --json"]
    if code == 2:
        assert name == "history.jsonl" and damage in ("a folder", "unreadable")
        return
    made = json.loads(out)
    assert (made["lost"], made["duplicated"]) == (0, 0)
    assert code == (0 if made["clean"] else 1)
    if name == "history.jsonl" and not (damage == "unreadable" and not os.geteuid()):
        assert made["damage"] and made["unrecorded"] > 0 and code == 1
    elif name != "metrics.jsonl":  # a changed number there contradicts the other records
        assert code == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"url": 3, "token": "x"}', '{"url": "nats://h:x"}', "folder"])
def test_an_address_that_is_damaged_is_none(copy: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = copy / "bus.json"
    path.mkdir() if text == "folder" else path.write_bytes(text.encode("latin1"))
    said = look(copy, capsys)
    assert said["audit"][0] == 0
    assert said["top --once"][0] == said["doctor"][0] == 2
    assert "bus.json: " in said["doctor"][1]


@pytest.mark.parametrize("left", ["history.jsonl", "metrics.jsonl", "checkpoints", "nothing"])
def test_of_a_folder_with_one_file_left_what_there_is_is_said(
    quiet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if (quiet / left).is_dir():
        shutil.copytree(quiet / left, folder / left)
    elif left != "nothing":
        shutil.copyfile(quiet / left, folder / left)
    code, out = look(folder, capsys)["audit"]
    assert code == {"history.jsonl": 1, "metrics.jsonl": 1, "checkpoints": 1, "nothing": 2}[left]
    if left == "history.jsonl":
        assert "there is no checkpoint that can be read, and one was due at step 2" in out
    if left in ("checkpoints", "metrics.jsonl"):
        assert "history.jsonl is gone" in out
        assert out.endswith("RECORD DAMAGED, and nothing else is wrong\n")


def test_a_broken_line_of_the_history_is_named_with_its_steps(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "history.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if b'"trained"' in line and b'"step": 3' in line)
    lines[number] = b"\xff" + lines[number][1:]
    path.write_bytes(b"".join(lines))
    said = look(copy, capsys)
    code, out = said["audit"]
    assert code == 1
    assert f"history.jsonl is damaged (step 3): line {number + 1} cannot be read: " in out
    assert "unrecorded                    4  done, but how is in a damaged part of the record\n" in out
    assert out.endswith("RECORD DAMAGED, and nothing else is wrong\n")
    assert said["replay"][0] == 2
    assert said["open_run"] == (0, "4 metrics, 12 groups")


def test_damaged_rows_of_metrics_are_skipped_and_counted(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\xff" + lines[1][1:]
    path.write_bytes(b"".join(lines))
    said = look(copy, capsys)
    code, out = said["audit"]
    assert code == 0
    assert "metrics.jsonl is damaged: 1 of its 4 rows cannot be read (line 2)" in out
    assert "compared with metrics.jsonl for 3 of 4 steps" in out
    assert said["open_run"][1].startswith("3 metrics")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "gone", "a folder"])
def test_a_damaged_store_of_the_bus_ends_no_command_with_a_traceback(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """The files of nats-server: its settings, a stream's settings, and its messages."""
    folder = tmp_path / "run"
    ignored = shutil.ignore_patterns("weights", "logs")
    for pattern in ("nats-server.conf", "nats-server.lock", "*trajectories/meta.inf", "*trajectories/**/*.blk"):
        shutil.copytree(run.run_directory, folder, ignore=ignored)
        paths = [path for path in (folder / "nats").rglob(pattern) if path.is_file()]
        assert paths, pattern
        for path in paths:
            DAMAGES[damage](path)
        for words in (["audit", "--json"], ["replay"]):
            code, out, err = asyncrl(words[0], str(folder), *words[1:], capsys=capsys)
            assert "Traceback" not in out + err
            assert len(err.splitlines()) <= 1, err
            assert code in (0, 1, 2)
        shutil.rmtree(folder)


SEEDS = int(os.environ.get("ASYNCRL_DAMAGES", "30"))
MORE: list[tuple[str, ...]] = [
    ("samples",),
    ("samples", "--group", "2"),
    ("samples", "--json", "--worst"),
    ("trace",),
]


async def show(folder: Path) -> None:
    """Load everything that the board shows of a finished run."""
    feed = RunFeed(WatchedRun(folder, [], token="", verb="board"), tell=json.dumps)
    await feed.begin()
    readers = Readers("test")
    groups = await feed.groups(readers)
    lanes = await feed.lanes(readers)
    readers.close()
    for made in (
        feed.state.overview(),
        feed.state.curves_named(feed.state.curves),
        feed.state.lanes_as_json(),
        lanes,
        list(rows_as_json(groups.rows()[0])),
    ):
        json.dumps(made, allow_nan=False)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_is_damaged_nobody_ends_with_a_traceback_or_calls_a_broken_record_clean(
    quiet: Path, copy: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Damage one to three files, each in one of many ways. ASYNCRL_DAMAGES=300 draws more cases."""
    done = spoil(copy, seed)
    said = look(copy, capsys)
    for words in (*MORE, ("diff", str(quiet))):
        code, out, err = asyncrl(words[0], str(copy), *words[1:], capsys=capsys)
        assert code in (0, 1, 2) and "Traceback" not in out + err, (done, words, out, err)
        assert len(err.splitlines()) <= 1, (done, words, err)
        assert not re.search(r"^asyncrl [a-z]+: [A-Za-z]+(Error|Exception): ", err), (done, words, err)
    with contextlib.suppress(AsyncRLError):
        asyncio.run(show(copy))
    code, out = said["audit"]
    if code in (0, 1):
        made = json.loads(said["audit --json"][1])
        assert (made["lost"], made["duplicated"]) == (0, 0), (done, out)
    if code == 0:
        whole = set((quiet / "history.jsonl").read_bytes().splitlines())
        assert whole <= set((copy / "history.jsonl").read_bytes().splitlines()), (done, out)
        assert checkpoint.latest(copy / "checkpoints") is not None, (done, out)
    with contextlib.suppress(OSError):  # a checkpoint that cannot be read now is not set aside
        checkpoint.resume(copy / "checkpoints", say=lambda line: None)
