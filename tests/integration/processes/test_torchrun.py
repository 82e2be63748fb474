"""A learner of two machines under torchrun goes on when a machine is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.gpu import machines
from benchmarks.gpu.learner import layout_of
from benchmarks.gpu.learner_step import Variant
from benchmarks.gpu.shapes import SHAPES, make_model
from tests.harness.forked import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("learner-ranks")]


RANK = ("-m", "tests.harness.fork_client", "--module", "benchmarks.gpu.machines_rank")


def test_two_machines_meet_again_after_a_death(
    tmp_path: Path, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after it are those that the checkpoint continues with. That machines train as one process tree does, the
    benchmark and test_layouts.py show."""
    make_model(SHAPES["tiny"], tmp_path / "model", dtype="float32")
    variant = Variant(shape="tiny", tokens=512, length=256, overlap=False, **layout_of("dp2"))
    task = {
        "variant": dataclasses.asdict(variant),
        "model": str(tmp_path / "model"),
        "state": str(tmp_path / "state"),
        "device": "cpu",
        "dtype": "float32",
        "steps": 5,
        "is_killed": True,
    }
    for name, value in forks.environment.items():
        monkeypatch.setenv(name, value)
    found = machines.as_machines(task, tmp_path, limit=300.0, rank=RANK)
    assert found["exit_code"] == 0
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4, 5]
    assert len({step["pid"] for step in found["steps"]}) == 2, "the learner of the first steps is not that of the last"
    assert found["trained_seconds"] > found["noticed_seconds"]
