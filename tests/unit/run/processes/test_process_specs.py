"""What `asyncrl run` prints about the processes that it is about to start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.data import demo_task
from asyncrl.run.processes.process_specs import ProcessSpecs
from tests.harness.fleet import Launcher
from tests.unit.run.checks.test_run_file import RUN_FILE


@pytest.mark.parametrize(
    ("keeps_no_bytecode", "gpus", "is_said"), [(True, 2, True), (True, 0, False), (False, 2, False)]
)
def test_python_that_keeps_no_bytecode_is_warned_of_where_engines_are_on_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keeps_no_bytecode: bool,
    gpus: int,
    is_said: bool,
) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", keeps_no_bytecode)
    monkeypatch.setattr("asyncrl.run.processes.gpus.num_gpus", lambda: gpus)
    monkeypatch.setattr("asyncrl.run.processes.gpus.gpus_per_worker", lambda run: int(gpus > 0))
    run = config.load(tmp_path / "run.toml")
    ProcessSpecs(run, launcher=Launcher(), common=(), environment={}).initial(size=None, resume=False)
    assert ("PYTHONDONTWRITEBYTECODE" in capsys.readouterr().out) is is_said


def test_the_ranks_of_a_learner_on_several_machines_say_where_they_go_and_whom_they_meet(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    overrides = ("backend=megatron", "ranks=4", "pipeline_parallel=2", "machines=2")
    run = config.load(tmp_path / "run.toml", [f"learner.{override}" for override in overrides])
    made = ProcessSpecs(run, launcher=Launcher(), common=(), environment={}).initial(size=None, resume=False)
    ranks = [child.spec for child in made if child.name.startswith("learner")]
    assert [(spec.name, spec.beside, spec.apart, spec.meets) for spec in ranks] == [
        ("learner", "", ("learner-2",), "learner"),
        ("learner-1", "learner", (), "learner"),
        ("learner-2", "", ("learner",), "learner"),
        ("learner-3", "learner-2", (), "learner"),
    ]
