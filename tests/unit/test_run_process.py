"""What tests and benchmarks read from a run's folder while its files are incomplete."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.run_process import RunProcess


@pytest.mark.parametrize(
    ("written", "steps"),
    [("", 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"step": 2}\n', 2), ('{"step": 1}\n{"st', 1), ('{"st', 0)],
)
def test_the_steps_of_a_file_that_is_being_written_are_those_that_are_whole(
    tmp_path: Path, written: str, steps: int
) -> None:
    run = RunProcess(tmp_path)
    assert run.steps == 0
    run.run_directory.mkdir(parents=True)
    (run.run_directory / "metrics.jsonl").write_text(written)
    assert run.steps == steps
