"""Rows and logs of benchmarks.gpu.colocated, also of runs that fail."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import colocated
from benchmarks.gpu.colocated import Memory, keep_logs, left_behind


def test_a_run_that_did_not_start_leaves_its_output(tmp_path: Path) -> None:
    (tmp_path / "turns_one_step_off.log").write_text("refused")
    keep_logs("turns_one_step_off", tmp_path, tmp_path / "logs" / "turns_one_step_off")
    kept = tmp_path / "logs" / "turns_one_step_off"
    assert {path.name: path.read_text() for path in kept.iterdir()} == {"turns_one_step_off.log": "refused"}


def test_the_logs_of_a_runs_processes_are_kept(tmp_path: Path) -> None:
    logs = tmp_path / "runs" / "turns-one-step-off" / "logs"
    logs.mkdir(parents=True)
    (logs / "w1.log").write_text("died")
    keep_logs("turns_one_step_off", tmp_path, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["w1.log"]


def test_the_most_that_each_rank_left_in_use_is_in_the_row() -> None:
    rows = [
        {"learner/rank1/kept_memory_bytes": 2.0**30, "learner/rank0/tokens": 5},
        {"step": 2},
        {"learner/rank1/kept_memory_bytes": 2.0**31, "learner/rank0/used_memory_bytes": 2.0**32},
    ]
    assert left_behind(rows) == {"learner/rank0/used_memory_gib": 4.0, "learner/rank1/kept_memory_gib": 2.0}


def test_used_memory_is_of_each_gpu() -> None:
    memory = Memory.__new__(Memory)
    memory.seen = [(0.0, 0, 1), (1.0, 0, 2048), (1.0, 1, 1024), (2.0, 0, 3072), (2.0, 1, 512)]
    assert memory.between(1.0, 2.0) == {
        "memory_max_gib": 3.0,
        "memory_min_gib": 2.0,
        "memory_max_gib_1": 1.0,
        "memory_min_gib_1": 0.5,
    }


def test_an_arm_that_is_cut_off_keeps_the_steps_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(Memory):
        def __init__(self, gpus: int) -> None:
            self.seen = [(3.5, 0, 2048)]

        def close(self) -> None:
            pass

    def cut_off(words: list[str], **_: Any) -> None:
        metrics = tmp_path / "runs" / "turns" / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        steps = [{"step": step, "time": float(step), "learner/step_seconds": 2.0 * step} for step in range(1, 5)]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in steps))
        raise subprocess.TimeoutExpired(words, 1.0)

    monkeypatch.setattr(colocated, "Memory", Watched)
    monkeypatch.setattr(subprocess, "run", cut_off)
    options = argparse.Namespace(
        model=None, steps=9, gpus=1, groups=8, length_max=64, limit_seconds=1.0, set={}, engine={}, resume={}
    )
    row = colocated.run("turns", options, tmp_path)
    assert (row["exit_code"], row["steps"], row["learner/step_seconds"]) == (-1, 2, 7.0)
    assert row["memory_max_gib"] == 2.0
    assert "log" in row
