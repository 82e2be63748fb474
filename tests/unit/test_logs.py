"""What a user sees of a process, and what its log contains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.logs import REASON, Stderr, log_to, logging_to


def test_of_many_messages_for_one_reason_few_are_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("w0")
    log.addHandler(Stderr())
    for number in range(250):
        log.warning("group %d is failed: %s", number, "it raised", extra={REASON: "it raised"})
    log.warning("group 7 is failed: another", extra={REASON: "another"})
    log.warning("away")
    log.warning("away")
    assert capsys.readouterr().err.splitlines() == [
        "group 0 is failed: it raised",
        "group 9 is failed: it raised (10 for this reason; the log has all)",
        "group 99 is failed: it raised (100 for this reason; the log has all)",
        "group 7 is failed: another",
        "away",
        "away",
    ]


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """Yield asyncrl's logger, and restore all loggers after the test."""
    root, ours = logging.getLogger(), logging.getLogger("asyncrl")
    kept: list[Any] = [list(root.handlers), list(ours.handlers)]
    settings = ours.level, ours.propagate, logging.raiseExceptions
    yield ours
    for handler in {*root.handlers, *ours.handlers} - {*kept[0], *kept[1]}:
        handler.close()
    root.handlers, ours.handlers = kept
    ours.level, ours.propagate, logging.raiseExceptions = settings


def test_in_a_process_of_somebody_else_only_our_messages_are_written_and_only_while_a_run_is_up(
    ours: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root_handlers = list(logging.getLogger().handlers)
    for run in range(3):
        with logging_to(tmp_path / "logs" / f"{run}.log"):
            ours.getChild("learner").info("step %d", run)
            ours.getChild("learner").warning("slow %d", run)
            logging.getLogger("somebody").warning("else")
            assert logging.getLogger().handlers == root_handlers
    assert "else" not in (tmp_path / "logs" / "2.log").read_text()
    assert [line.split(" INFO ")[-1].split(" WARNING ")[-1] for line in _lines(tmp_path / "logs" / "2.log")] == [
        "   asyncrl.learner: step 2",
        "asyncrl.learner: slow 2",
    ]
    shown = [line for line in capsys.readouterr().err.splitlines() if "slow" in line]
    assert shown == [f"asyncrl.learner: slow {run}" for run in range(3)]
    assert not ours.handlers


def test_a_process_that_begins_to_log_twice_shows_each_line_once(
    ours: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        log_to(tmp_path / "run.log")
        logging.getLogger().handlers[0].close()
    ours.warning("once")
    assert capsys.readouterr().err == "asyncrl: once\n"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
