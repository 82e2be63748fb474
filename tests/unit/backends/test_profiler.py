"""The profiler records the chosen steps; its own failures fail no step."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest
import torch

from asyncrl.backends.profiler import StepProfiler


def step() -> float:
    return float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())


def test_profiles_only_the_chosen_steps(tmp_path: Path) -> None:
    profiler = StepProfiler((2,), tmp_path)
    assert [profiler(number, step) for number in (1, 2, 3)] == [512.0] * 3
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "step-000002.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_profiler_error_does_not_fail_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        assert StepProfiler((1,), tmp_path)(1, step) == 512.0
    assert "no profile of step-000001: FileExistsError" in caplog.text


def test_without_a_gpu_no_snapshot_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    StepProfiler((1,), tmp_path)(1, step)
    assert {path.suffix for path in (tmp_path / "profile").iterdir()} == {".json"}


@pytest.mark.gpu
def test_a_gpus_snapshot_names_what_was_allocated(tmp_path: Path) -> None:
    StepProfiler((1,), tmp_path)(1, lambda: torch.ones(2**20, device="cuda").sum().item())
    with (tmp_path / "profile" / "step-000001.pickle").open("rb") as file:
        found = pickle.load(file)
    allocated = [entry["size"] for trace in found["device_traces"] for entry in trace if entry["action"] == "alloc"]
    assert any(size >= 4 * 2**20 for size in allocated)
