"""The owner of a process: its output, log and end reach a launcher elsewhere; missing parts are reported."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from asyncrl.launch.launchers import process_agent
from asyncrl.launch.launchers.process_agent import MARK, LaunchRequest, OutputChunk, ProcessAgent

OURS = "ours"


@pytest.fixture
def order(tmp_path: Path) -> LaunchRequest:
    """Request a process whose log folder belongs to the launcher."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / MARK).write_text(OURS)
    (tmp_path / "logs" / "w0.log").write_text("of an earlier life\n")
    return LaunchRequest(arguments=(), directory=str(tmp_path), mark=OURS, log=str(tmp_path / "logs" / "w0.log"))


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Run a script in place of ``python -m asyncrl ...``."""
    script = folder / "process"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


async def everything(of: ProcessAgent) -> tuple[list[tuple[str, str]], int]:
    """Return all lines from the beginning, and the exit code."""
    lines: list[tuple[str, str]] = []
    last = 0
    while True:
        news: OutputChunk = await of.news(last)
        lines, last = [*lines, *news.lines], news.last
        if news.code is not None:
            return lines, news.code


async def test_returns_output_and_exit_code(
    order: LaunchRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, 'echo "$1 $2 $3 $SECRET in $PWD"; echo bad >&2; exit 7')
    made = ProcessAgent()
    asked = dataclasses.replace(order, arguments=("-m", "asyncrl", "learner"), environment={"SECRET": "s3"})
    assert "s3" not in repr(asked)
    started = await made.start(asked)
    assert (started.problem, started.pid > 0) == ("", True)
    lines, code = await everything(made)
    assert (sorted(lines), code) == ([("stderr", "bad"), ("stdout", f"-m asyncrl learner s3 in {tmp_path}")], 7)
    assert await made.news(2) == OutputChunk(lines=(), last=2, code=7)  # fetched lines are gone, the exit code remains


async def test_keeps_a_bounded_number_of_lines_and_says_how_many_are_lost(
    order: LaunchRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_agent, "MAX_LINES", 3)
    made = ProcessAgent()
    for number in range(5):
        made._add("stdout", str(number))
    news = await made.news(0)
    assert [line for _, line in news.lines] == ["(2 lines lost)", "2", "3", "4"]
    assert news.last == 5


async def test_forwards_signals_and_blocks_none_in_the_process(
    order: LaunchRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, "echo up; exec sleep 60")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as raylets do
    try:
        made = ProcessAgent()
        started = await made.start(order)
        await made.news(0)
        assert blocked_signals(started.pid) == 0
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.killpg(started.pid, 0)  # the process has its own group
    await made.signal(signal.SIGTERM)
    assert (await everything(made))[1] == -signal.SIGTERM


def blocked_signals(pid: int) -> int:
    """Blocked signals of the process, as a bit mask."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)


async def test_forwards_the_log_if_its_folder_is_not_shared(
    order: LaunchRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, f"echo new >> {order.log}; printf half >> {order.log}")
    made = ProcessAgent()
    await made.start(dataclasses.replace(order, mark="another's"))
    assert await everything(made) == ([("log", "new"), ("log", "half")], 0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"shares_folder": True, "mark": "another's"},
            "is not the folder that `asyncrl run` sees; it must be shared",
        ),
        ({"directory": "/nowhere"}, "the folder /nowhere, in which `asyncrl run` was started, is not there"),
        ({"version": "0"}, "is installed there, 0 here; install the same on every machine"),
    ],
)
async def test_machine_that_lacks_something_starts_nothing_and_says_so(
    order: LaunchRequest, change: dict[str, object], problem: str
) -> None:
    started = await ProcessAgent().start(dataclasses.replace(order, **change))
    assert problem in started.problem
    assert started.pid == 0
