"""The comparison of learning on stale samples: its task, its arms, its clock, and its table."""

from __future__ import annotations

import json
import queue
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.adapters import registry
from benchmarks.gpu import learning, learning_arms, plot_learning, reasoning
from benchmarks.gpu.arm import ArmResult, settings
from benchmarks.gpu.learning import arguments, places
from benchmarks.gpu.learning_arms import ARMS, Job, Outcome, Scene

MIXTURES = pytest.mark.parametrize("mixture", ["sums", "mixed"])


def problems(mixture: str, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (reasoning.TASKS / mixture / name).read_text().splitlines()]


# -- task --------------------------------------------------------------------------------------------------------------


@MIXTURES
def test_a_worked_answer_is_right(mixture: str) -> None:
    for problem in problems(mixture, reasoning.TRAINED):
        assert reasoning.is_right(reasoning.worked(problem["expression"]), problem["answer"])


@MIXTURES
def test_nobody_trains_on_the_exam(mixture: str) -> None:
    trained = {problem["expression"] for problem in problems(mixture, reasoning.TRAINED)}
    asked = [problem["expression"] for problem in problems(mixture, reasoning.HELD_OUT)]
    if mixture != "sums":  # one sum of those that are shown is in its exam, which recorded runs have taken
        assert {shot for task in reasoning.KINDS.values() for shot in task.shots}.isdisjoint(asked)
    assert trained.isdisjoint(asked)
    assert len(set(asked)) == len(asked) == 256


def test_the_exam_judges_as_the_reward_does() -> None:
    run_file = tomllib.loads(learning_arms.RUN_FILE.read_text())
    assert run_file["reward"] == {"kind": "regex", "options": {"pattern": reasoning.ANSWER}}
    assert not reasoning.is_right("11", "11")
    assert not reasoning.is_right("The answer is 11. The answer is 7.", "11")


# -- arms --------------------------------------------------------------------------------------------------------------


def scene(folder: Path) -> Scene:
    exam: Any = None
    return Scene(
        model=folder,
        data=folder,
        dtype="bfloat16",
        steps=80,
        groups_per_batch=32,
        group_size=8,
        learning_rate=1e-5,
        running=512,
        channel="files",
        settings={},
        exam=exam,
        out=folder,
        scratch=folder,
    )


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_a_run_that_the_product_accepts(arm: str, tmp_path: Path) -> None:
    run = config.load(learning_arms.RUN_FILE, settings(scene(tmp_path).overrides(Job(arm=arm, seed=1))))
    assert run.max_staleness == ARMS[arm].max_staleness
    assert registry.algorithm(run).correction_name == ARMS[arm].correction
    assert run.data.chat_template


def test_slots_fill_every_gpu_before_they_share_one() -> None:
    assert places(arguments(["--gpus", "2", "--slots-per-gpu", "2"])) == [(0, 0), (1, 1), (0, 0), (1, 1)]
    pairs = places(arguments(["--gpus", "4", "--gpus-per-arm", "2"]))
    assert pairs == [(1, 0), (3, 2)]  # engine, learner


class BrokenSlot:
    """Fails with the first job that it takes, with an ``error`` that slots do not handle."""

    error: Exception | None = None

    def __init__(self, number: int, **_: Any) -> None:
        self.number = number

    def work(self, jobs: queue.SimpleQueue[Job], done: queue.SimpleQueue[Outcome | None]) -> None:
        jobs.get_nowait()
        done.put(None)
        if self.error is not None:
            raise self.error


def test_an_arm_whose_slot_fails_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(learning, "Slot", BrokenSlot)
    options = arguments(["--arms", "sync", "--seeds", "0", "1"])
    given: Any = (options, None, learning_arms.Stop(60.0))
    outcomes, lost = learning.run_all(*given)
    assert (outcomes, lost) == ([], ["sync-seed0"]), "the other one was not begun, which is said"
    monkeypatch.setattr(BrokenSlot, "error", KeyError("loads"))
    with pytest.raises(KeyError, match="loads"):
        learning.run_all(*given)


# -- rows --------------------------------------------------------------------------------------------------------------


def outcome(*, began: float, step_seconds: list[float], ends: list[float]) -> Outcome:
    rows = [
        {"step": number, "time": end, "learner/step_seconds": seconds, "reward/mean": 0.25, "staleness/max": 1.0}
        for number, (end, seconds) in enumerate(zip(ends, step_seconds, strict=True), 1)
    ]
    result = ArmResult(rows=rows, ended="enough", seconds=1.0, exit_code=None, problem="", logs=())
    return Outcome(job=Job(arm="sync", seed=0), slot=0, began=began, result=result, exam={})


def test_seconds_run_from_the_first_token_without_compilation() -> None:
    """The first step takes 21 s, the median one 1 s: 20 s are compilation. 125 - 100 - 20 = 5, then 7 and 9."""
    made = outcome(began=100.0, step_seconds=[21.0, 1.0, 1.0], ends=[125.0, 127.0, 129.0])
    rows = list(learning_arms.step_rows(made, samples_per_step=256, steps=3))
    assert [row["seconds"] for row in rows] == [5.0, 7.0, 9.0]
    assert [row["samples"] for row in rows] == [256, 512, 768]


def test_a_broken_staleness_bound_is_told() -> None:
    made = outcome(began=0.0, step_seconds=[1.0], ends=[1.0])
    assert list(learning_arms.broken_promises([made])) == ["sync-seed0: staleness 1.0 over the bound 0"]


# -- table and picture -------------------------------------------------------------------------------------------------


def written(path: Path, *, arm: str, seed: int, rewards: list[float], staleness: float, held_out: float) -> None:
    about = {"arm": arm, "seed": seed, "settings": {"staleness.max_staleness": str(ARMS[arm].max_staleness)}}
    rows: list[dict[str, Any]] = [{"run": about | {"exam": {"held_out": held_out}}}]
    rows += [
        {"step": step, "samples": 10 * step, "seconds": 2.0 * step, "reward": reward, "ess": 1.0, "entropy": 0.5}
        | {"staleness_mean": min(staleness, step - 1), "dropped_groups": 0}
        for step, reward in enumerate(rewards, 1)
    ]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_reward_belongs_to_the_weights_that_earned_it(tmp_path: Path) -> None:
    """Staleness 0, 1, 2, 2: steps 1 to 3 were answered by version 0, step 4 by version 1, trained on 10 samples."""
    path = tmp_path / "rows.jsonl"
    written(path, arm="async-4-tis", seed=0, rewards=[0.1, 0.2, 0.3, 0.4], staleness=2.0, held_out=0.5)
    (curve,) = plot_learning.read([path])["async-4-tis"]
    np.testing.assert_allclose(curve.learned(), [0, 0, 0, 10])


def test_the_table_compares_the_exams_with_their_errors(tmp_path: Path) -> None:
    """Exams 0.5, 0.6 and 0.7, 0.8: 0.2 apart, each with a standard error of 0.05, together 0.071."""
    path = tmp_path / "rows.jsonl"
    for seed in (0, 1):
        written(path, arm="sync", seed=seed, rewards=[0.5] * 10, staleness=0.0, held_out=0.5 + 0.1 * seed)
        written(path, arm="async-4-tis", seed=seed, rewards=[0.5] * 10, staleness=4.0, held_out=0.7 + 0.1 * seed)
    written(path, arm="async-0", seed=0, rewards=[0.5] * 3, staleness=0.0, held_out=0.1)  # cut short
    arms = plot_learning.read([path])
    assert list(arms) == ["sync", "async-4-tis"]
    assert "+0.200 ± 0.071  above" in list(plot_learning.table(arms))[2]
    plot_learning.draw(arms, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
