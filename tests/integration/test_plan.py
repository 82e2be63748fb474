"""`asyncrl plan` on a small model: measurements, output, and refusals."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.cli import main
from asyncrl.errors import AsyncRLError
from asyncrl.planning import plan
from asyncrl.planning.allocation import ENOUGH
from asyncrl.planning.command import few_running
from asyncrl.planning.engine_probe import LOOK_SECONDS, measure_engine
from asyncrl.planning.learner_probe import measure_learner
from asyncrl.planning.plan import in_process
from asyncrl.planning.together import Together
from tests import ROOT
from tests.harness.forked import ForkServer

BACKEND = ("learner.backend=reference", "learner.device=cpu", "bus.kind=memory")


def overrides(demo: Path, folder: Path) -> list[str]:
    paths = (f"model.path={demo / 'model'}", f"data.path={demo / 'prompts.jsonl'}", f"run.directory={folder}")
    return [*BACKEND, *paths]


def words(demo: Path, folder: Path, *arguments: str) -> list[str]:
    given = [word for item in overrides(demo, folder) for word in ("--set", item)]
    return ["plan", str(ROOT / "examples" / "demo.toml"), *given, *arguments]


def test_every_group_that_an_engine_begins_is_seen_to_its_end_and_trained(demo: Path, tmp_path: Path) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", overrides(demo, tmp_path))
    engine = measure_engine(run, seconds=1.0, dry_seconds=600.0)
    assert (engine.num_failed, engine.num_unfinished) == (0, 0)
    assert sorted(group.group_id for group in engine.groups) == list(range(len(engine.groups)))
    assert all(len(group.trajectories) == run.rollout.group_size for group in engine.groups)
    sampled = sum(int(one.response_mask.sum()) for group in engine.groups for one in group.trajectories)
    assert 0 < sum(reading.tokens for reading in engine.readings) <= sampled
    learner = measure_learner(run, engine.groups, seconds=0.1)
    assert all(reading.tokens > 0 and reading.seconds > 0 for reading in learner.readings)
    assert learner.larger is None  # one batch does not fill larger rows


def test_engine_and_learner_are_measured_together_while_the_learner_trains(demo: Path, tmp_path: Path) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", overrides(demo, tmp_path))
    groups = measure_engine(run, seconds=0.5, dry_seconds=600.0).groups
    together = Together()
    with ThreadPoolExecutor(2) as pool:
        engine = pool.submit(measure_engine, run, together, seconds=1.0)
        learner = pool.submit(measure_learner, run, groups, together, seconds=1.0)
    assert sum(reading.tokens for reading in engine.result().readings) > 0
    trained = sum(reading.seconds for reading in learner.result().readings)
    sampled = sum(reading.seconds for reading in engine.result().readings)
    assert learner.result().larger is None and sampled < 2 * trained + 5 * LOOK_SECONDS


def test_neither_waits_for_the_other_once_one_has_failed(demo: Path, tmp_path: Path) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", overrides(demo, tmp_path))
    groups = measure_engine(run, seconds=0.5, dry_seconds=600.0).groups
    together = Together()
    together.give_up()
    with pytest.raises(AsyncRLError, match="the engine on the learner's GPUs failed"):
        measure_learner(run, groups, together, seconds=60.0)
    measure_engine(run, together, seconds=60.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_says_the_keys_to_set_and_what_to_expect(demo: Path, tmp_path: Path, forks: ForkServer) -> None:
    """Its measurements are forks, in place of processes that import for six seconds each."""
    command = words(demo, tmp_path, "--gpus", "3", "--seconds", "1", "--json")
    code, said = forks.call(*command, module="tests.harness.forked_measurements")
    assert code == 0, said
    found = json.loads(said[said.index("{") :])
    assert found["settings"]["learner.ranks"] + found["settings"]["rollout.workers"] == 3
    assert found["best"] in found["splits"]
    assert found["now"]["copies"] == 1 and found["now"]["engines"] == 2  # the run file's own
    assert all(row["tokens_per_second"] > 0 for row in found["splits"])
    assert not list(tmp_path.iterdir())  # nothing of a run is left


def test_the_window_is_named_only_where_it_holds_fewer_samples_than_may_run() -> None:
    run = config.load(ROOT / "examples" / "demo.toml", ["rollout.max_running=128", "learner.device=cpu"])
    assert run.window * run.rollout.group_size == 640
    assert "no more than 10 samples ran at once" in few_running(run, 10.4)
    larger = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, max_running=1000))
    assert "the window (groups_per_batch x (max_staleness + 1) groups) has only 640 samples" in few_running(
        larger, 10.4
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_of_one_gpu_says_what_pausing_the_engine_for_the_steps_would_give(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_may_share", lambda _run, _units: True)
    monkeypatch.setattr(plan, "num_gpus", lambda: 1)
    monkeypatch.setattr(plan, "Pauses", object)  # as if the engine in the process could
    assert main.main(words(demo, tmp_path, "--gpus", "1", "--seconds", "1", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["other_way"]["beside_learner"] == "pause"
    of_best = {key: found["best"][key] for key in ("copies", "engines", "beside", "max_staleness")}
    assert of_best == {key: found["other_way"][key] for key in of_best} and of_best["beside"] == 1
    is_said = "rollout.beside_learner" in found["settings"]
    assert is_said == (found["other_way"]["tokens_per_second"] * ENOUGH > found["best"]["tokens_per_second"])


def test_where_nothing_can_be_split_is_said_in_one_line(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, problem in (
        (("--gpus", "1"), "--gpus 1: learner and engine share the GPUs, so there is no split to plan"),
        (("--gpus", "0"), "--gpus 0: must be in 1..4096"),
        (("--gpus", "2", "--seconds", "0"), "--seconds 0: must be in [1, 3600]"),
        (("--gpus", "2", "--set", "learner.backend=none"), 'learner.backend: "none" takes no GPUs'),
        (("--gpus", "2", "--set", "rollout.function=given"), 'rollout.function: "given" samples nothing'),
    ):
        assert main.main(words(demo, tmp_path, *arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line


@pytest.fixture
def forked_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A measurement's process is a fork, which imports nothing; these measure on no GPU."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, where threads run
        yield


def _dies(run: config.RunConfig, *, seconds: float) -> None:
    import os

    os._exit(9)


@pytest.mark.usefixtures("forked_here")
def test_a_measurement_that_is_killed_is_said(demo: Path, tmp_path: Path) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", overrides(demo, tmp_path))
    with pytest.raises(AsyncRLError, match="_dies: its process was killed"):
        in_process(_dies, run, seconds=1.0)


class _Unusual(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not to be pickled")


def _raises(run: config.RunConfig, *, seconds: float) -> None:
    raise _Unusual("the engine's own")


@pytest.mark.usefixtures("forked_here")
def test_what_a_measurement_raises_is_raised_here(demo: Path, tmp_path: Path) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", overrides(demo, tmp_path))
    with pytest.raises(AsyncRLError, match="_Unusual: the engine's own"):
        in_process(_raises, run, seconds=1.0)
