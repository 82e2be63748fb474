"""A learner of two machines under torchrun: it trains as one process tree does, and goes on when a machine is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.xdist_group("learner-ranks")]


def test_two_machines_train_as_one_and_meet_again_after_a_death(tmp_path: Path) -> None:
    """Only one agent counts the restart. Steps after it are those that the checkpoint continues with."""
    rows = tmp_path / "rows.jsonl"
    rehearsal = ("--device", "cpu", "--shapes", "tiny", "--tokens", "512", "--limit", "600")
    assert machines.main([*rehearsal, "--layouts", "dp2", "--json", str(rows)]) == 0
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert [step["step"] for step in row["steps"]] == [1, 2, 3, 4, 5]
    assert len({step["pid"] for step in row["steps"]}) == 2, "the learner of the first steps is not that of the last"
    assert row["worst_metric_relative"] < 1e-5
    assert row["trained_seconds"] > row["noticed_seconds"]
