"""Recorded evaluation answers: those to some prompts in full, the same prompts each time, and only if they counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner.evaluation_round import EvaluationRound
from asyncrl.actors.learner.sample_files import EVALUATION_FILE, SampleFile, read
from asyncrl.actors.learner.sample_recorder import AnswerRecorder, SampleWriter
from asyncrl.errors import MessageError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, WeightVersion, replace
from asyncrl.messages.evaluation import Answer, Evaluation, EvaluationAnswers
from asyncrl.policies.groups.sample import GroupSample
from tests.harness.evaluation import evaluating_worker, section, sums
from tests.harness.fakes import Engine, Loop, run_all, worker

SPAN = VersionSpan(start=0, incarnation=0, policy_version=20)


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def writer(folder: Path) -> SampleWriter:
    return SampleWriter(SampleFile(folder, name=EVALUATION_FILE), load_decode=lambda: decode, most_waiting=1000)


def evaluation(number: int, *, version: int = 20) -> Evaluation:
    return Evaluation(number=number, weights=WeightVersion(incarnation=0, policy_version=version), num_prompts=30)


def whole(of: Evaluation, index: int, *, reward: float = 0.5) -> EvaluationAnswers:
    span = VersionSpan(start=0, incarnation=0, policy_version=of.weights.policy_version)
    trajectory = Trajectory(
        tokens=[7, 8, 9],
        response_mask=[True] * 3,
        behavior_logprobs=[-0.5] * 3,
        version_spans=(span,),
        reward=reward,
        finish_reason="length",
    )
    return EvaluationAnswers(
        number=of.number,
        group_id=of.group_id(index),
        dataset="sums",
        answers=(Answer(reward=reward, length=3, version_spans=(span,)),) * 2,
        worker="e0",
        group=TrajectoryGroup(
            group_id=of.group_id(index), prompt_tokens=[1, 4 + index], trajectories=(trajectory,) * 2
        ),
    )


def recorded(folder: Path) -> list[GroupSample]:
    return list(read(folder, EVALUATION_FILE))


async def test_the_same_prompts_are_recorded_every_time_with_what_is_right(tmp_path: Path) -> None:
    made = writer(tmp_path)
    for number, version in ((0, 0), (1, 20)):
        its = evaluation(number, version=version)
        asked = EvaluationRound(its, [sums(30)], recorder=AnswerRecorder(made, per_dataset=3))
        picked = [index for index in range(30) if asked.prompt(index).recorded_place == index]
        assert len(picked) == 3
        for index in range(30):  # a worker may send more than it was asked for
            assert asked.take(whole(its, index)) == (None, "")
    await made.stop()
    rows = recorded(tmp_path)
    assert [row.name for row in rows] == [f"sums, prompt {index}" for index in (*picked, *picked)]
    assert [row.step for row in rows] == [0, 0, 0, 20, 20, 20]
    row = rows[-1]
    assert (row.fate, row.dataset, row.label, row.reward) == ("evaluated", "sums", "1", 0.5)
    assert row.prompt == f"1 {4 + row.place}"
    assert [one.text for one in row.answers] == ["7 8 9"] * 2
    assert len({row.identity for row in rows}) == 6


async def test_saved_models_and_data_sets_with_the_same_prompts_are_told_apart(tmp_path: Path) -> None:
    """During evaluation 0 each model is version 0. Two models saved at one step differ by incarnation."""
    made, its = writer(tmp_path), evaluation(0, version=0)
    for model in ("0-20", "1-20"):
        for dataset in (sums(30), dataclasses.replace(sums(30), name="words")):
            recorder = AnswerRecorder(made, per_dataset=1, model=model, step=20)
            asked = EvaluationRound(its, [dataset], recorder=recorder)
            for index in range(30):
                asked.take(whole(its, index))
    await made.stop()
    rows = recorded(tmp_path)
    assert [(row.dataset, row.model, row.step) for row in rows] == [
        *(("sums", "0-20", 20), ("words", "0-20", 20), ("sums", "1-20", 20), ("words", "1-20", 20))
    ]
    assert len({row.identity for row in rows}) == 4
    assert all(answer.versions == () for row in rows for answer in row.answers), "version 0 says nothing of them"


async def test_answers_that_did_not_come_whole_are_lost_and_counted(tmp_path: Path) -> None:
    """`asyncrl evaluate --answers` promises all answers, so it must be able to report the missing ones."""
    file = SampleFile(tmp_path, name=EVALUATION_FILE)
    made, its = SampleWriter(file, load_decode=lambda: decode), evaluation(0)
    asked = EvaluationRound(its, [sums(30)], recorder=AnswerRecorder(made, per_dataset=30))
    asked.take(replace(whole(its, 4), group=None))
    asked.take(whole(its, 5))
    await made.stop()
    assert (len(recorded(tmp_path)), file.num_lost) == (1, 1)


OTHER_SPAN = VersionSpan(start=0, incarnation=0, policy_version=21)


@pytest.mark.parametrize("change", [{"reward": 0.75}, {"length": 4}, {"version_spans": (OTHER_SPAN,)}], ids=str)
def test_what_is_recorded_is_what_is_counted(change: dict[str, Any]) -> None:
    made = whole(evaluation(0), 4)
    counted = {"reward": 0.5, "length": 3, "version_spans": (SPAN,)} | change
    with pytest.raises(MessageError, match="what is recorded is not what is counted"):
        EvaluationAnswers(
            number=0, group_id=made.group_id, answers=(Answer(**counted), made.answers[1]), group=made.group
        )


@pytest.mark.parametrize("place", ["shared", "dedicated"])
async def test_a_run_records_answers_of_every_evaluation(place: Any, bus_factory: Any, tmp_path: Path) -> None:
    made = writer(tmp_path)
    loop = Loop(
        await bus_factory(),
        tmp_path,
        steps=4,
        evaluation=section(every_steps=2, place=place),
        evaluation_sets=[sums()],
        answers=AnswerRecorder(made, per_dataset=2),
        writers=[made],
    )
    evaluating = evaluating_worker(await bus_factory(), Engine(), name="e0", is_dedicated=place == "dedicated")
    training = [worker(await bus_factory(), Engine())] if place == "dedicated" else []
    await run_all(loop, evaluating, *training)
    rows = recorded(tmp_path)
    assert {0, 4} <= {row.step for row in rows} <= {0, 2, 3, 4}
    assert all(len(row.answers) == 2 and row.prompt and row.label == "1" for row in rows)
    for row in rows:  # the reward tells which version answered
        assert {answer.reward for answer in row.answers} == {float(row.step)}
        assert {version for answer in row.answers for _, _, version in answer.versions} == {row.step}
