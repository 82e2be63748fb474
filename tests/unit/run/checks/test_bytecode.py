"""`asyncrl check` and `run` say why a start on GPUs takes twice as long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.engines.inprocess.engine import InProcessEngine
from asyncrl.run.checks.run_file import check


@pytest.mark.parametrize(
    ("keeps_no_bytecode", "num_gpus", "is_said"), [(True, 1, True), (True, 0, False), (False, 1, False)]
)
def test_python_that_keeps_no_bytecode_is_warned_of_where_engines_are_on_gpus(
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keeps_no_bytecode: bool,
    num_gpus: int,
    is_said: bool,
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", keeps_no_bytecode)
    monkeypatch.setattr(InProcessEngine, "num_gpus", classmethod(lambda cls, run: num_gpus))
    check(config.load(run_file))
    said = [one.getMessage() for one in caplog.records if "PYTHONDONTWRITEBYTECODE" in one.getMessage()]
    assert len(said) == is_said
