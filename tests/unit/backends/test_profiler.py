"""Chosen steps are profiled; what fails of it fails no step."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from asyncrl.backends.profiler import StepProfiler
from asyncrl.config.learner import LearnerSection
from asyncrl.errors import ConfigError


def step() -> float:
    return float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())


def test_only_the_steps_that_were_asked_for_leave_a_trace(tmp_path: Path) -> None:
    profiler = StepProfiler((2,), tmp_path)
    assert [profiler(number, step) for number in (1, 2, 3)] == [512.0] * 3
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step-000002.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_what_a_step_raises_is_raised(tmp_path: Path) -> None:
    def fails() -> float:
        raise ValueError("a bad batch")

    with pytest.raises(ValueError, match="a bad batch"):
        StepProfiler((1,), tmp_path)(1, fails)


def test_a_profiler_that_fails_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        assert StepProfiler((1,), tmp_path)(1, step) == 512.0
    assert "no profile of step-000001: FileExistsError" in caplog.text


def test_a_step_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile_steps must be numbers of steps"):
        LearnerSection(profile_steps=(0,))
