"""What `asyncrl run` prints about the processes that it is about to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.backends.megatron.rank_group import rank_from_environment
from asyncrl.data import demo_task
from asyncrl.launch.processes.process_specs import ProcessSpecs
from asyncrl.os_process import environment_of_child
from tests.harness.fleet import Launcher
from tests.unit.launch.checks.test_run_file import RUN_FILE


def test_ranks_on_several_machines_have_placement_constraints(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("machines", [1, 2])
def test_learner_does_not_join_the_job_of_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machines: int
) -> None:
    """The surroundings are those of the first of 16 processes under torchrun."""
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    surroundings = {"WORLD_SIZE": "16", "RANK": "0", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
    for name, value in (surroundings | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    run = config.load(
        tmp_path / "run.toml", ["learner.backend=megatron", "learner.ranks=2", f"learner.machines={machines}"]
    )
    made = ProcessSpecs(run, launcher=Launcher(), common=(), environment={}).initial(size=None, resume=False)
    ranks = [environment_of_child(child.spec.environment) for child in made if child.name.startswith("learner")]
    infos = [rank_from_environment(one, ranks=2, timeout_seconds=60.0) for one in ranks]
    assert [one and (one.host, one.has_agent) for one in infos] == (
        [None] if machines == 1 else [("127.0.0.1", False)] * 2
    )
