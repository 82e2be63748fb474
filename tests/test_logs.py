"""What a person sees of a process, and what its log has."""

from __future__ import annotations

import logging

import pytest

from asyncrl.logs import REASON, Stderr


def test_of_many_messages_for_one_reason_few_are_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("w0")
    log.addHandler(Stderr())
    for number in range(250):
        log.warning("group %d is buried: %s", number, "it raised", extra={REASON: "it raised"})
    log.warning("group 7 is buried: another", extra={REASON: "another"})
    log.warning("away")
    log.warning("away")
    assert capsys.readouterr().err.splitlines() == [
        "group 0 is buried: it raised",
        "group 9 is buried: it raised (10 for this reason; the log has all)",
        "group 99 is buried: it raised (100 for this reason; the log has all)",
        "group 7 is buried: another",
        "away",
        "away",
    ]
