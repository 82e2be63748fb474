"""The learner's samples.jsonl: what is recorded, and that recording can never end a run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner import sample_recorder
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.actors.learner.history import read as read_history
from asyncrl.actors.learner.sample_files import SampleFile, read
from asyncrl.actors.learner.sample_recorder import SampleRecorder, SampleWriter
from asyncrl.backends.port import StepResult
from asyncrl.errors import RewardError
from asyncrl.messages.topics import EVENTS
from asyncrl.policies.batching.filters import dynamic_sampling
from asyncrl.policies.batching.packing import sequence_slices
from asyncrl.policies.groups.states import Outcome
from asyncrl.rewards.port import Reward, Sample
from tests.harness import buses, fakes
from tests.harness.fakes import Backend, Engine, Loop, run_worker, worker


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def written(directory: Path, **options: Any) -> SampleWriter:
    settings = {"load_decode": lambda: decode} | options
    return SampleWriter(SampleFile(directory, most_bytes=2**20), **settings)


def picky(samples: Sequence[Sample]) -> Sequence[Reward]:
    if samples[0].label == 0:
        raise RewardError("cannot judge p0")
    return [Reward(value=1.0) for _ in samples] if samples[0].label == 1 else fakes.token_sum(samples)


async def test_every_step_and_every_fate_is_recorded(bus_factory: Any, tmp_path: Path) -> None:
    writer = written(tmp_path)
    loop = Loop(
        await bus_factory(),
        tmp_path,
        steps=6,
        filters={"dynamic_sampling": dynamic_sampling},
        samples=SampleRecorder(writer, per_step=2),
        writers=[writer],
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine(), reward=fakes.Judge(picky))))
        await loop.run_learner()
    rows = list(read(tmp_path))
    fates = {i: (line.kind, line.step) for line in read_history(tmp_path / HISTORY_FILE) for i in line.groups}
    assert [row.step for row in rows if row.fate == "trained"] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert all(fates[row.group_id] == (row.fate, row.step) for row in rows)
    for row in rows:
        if row.fate == "trained":
            assert row.prompt == decode(row.prompt_tokens)
            assert all(answer.text == decode(answer.tokens) for answer in row.answers)
            assert sum(answer.advantage or 0.0 for answer in row.answers) == pytest.approx(0.0, abs=1e-4)
            assert row.staleness is not None and 0 <= row.staleness <= 2
    assert {row.reason for row in rows if row.fate == "filtered"} == {"by dynamic_sampling"}
    assert any("cannot judge p0" in row.reason for row in rows if row.fate == "failed")


async def test_the_bus_says_what_became_of_every_group(bus_factory: Any, tmp_path: Path) -> None:
    """Another machine without the history can then learn the fate of each group."""
    bus = await bus_factory()
    loop = Loop(bus, tmp_path, steps=3)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await loop.run_learner()
    trained = {}
    async with bus.read(EVENTS) as records:
        async for record in records:
            if record.message.kind == "trained":
                trained[record.message.data["step"]] = record.message.data["group_ids"]
            if len(trained) == 3:
                break
    lines = [line for line in read_history(tmp_path / HISTORY_FILE) if line.kind == "trained"]
    assert trained == {line.step: list(line.groups) for line in lines}


async def test_a_slow_decoder_holds_up_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    may_go_on = threading.Event()

    def slow(tokens: Sequence[int]) -> str:
        may_go_on.wait()
        return decode(tokens)

    writer = written(tmp_path, load_decode=lambda: slow)
    recorded = SampleRecorder(writer, per_step=1)
    count = sample_recorder.MOST_WAITING + 5
    for step in range(count):
        outcome = Outcome(fate="trained", group_ids=(step,), step=step + 1, groups=(buses.group(step),))
        recorded.record(outcome, incarnation=0, resume_points={})
    may_go_on.set()
    with caplog.at_level(logging.WARNING):
        await writer.stop()
    assert len(list(read(tmp_path))) == count - 5
    assert "5 groups in all were left out" in caplog.text


class Telling(Backend):
    """Returns a logprob whose digits are the token, and an entropy, for each token of a recorded sequence."""

    def step(self, shares: Any, *, learning_rate: float, model: str = "policy") -> StepResult:
        result = super().step(shares, learning_rate=learning_rate, model=model)
        tokens = {}
        for micro_batch in shares[0]:
            for number, place in zip(micro_batch.sequences.tolist(), sequence_slices(micro_batch), strict=True):
                if number in micro_batch.recorded:
                    ids = micro_batch.tokens[place][micro_batch.response_mask[place]].astype(np.float32)
                    tokens[number] = np.stack([-ids / 1000, ids])
        return StepResult(metrics=result.metrics, tokens=tokens)


async def test_a_trained_group_has_what_the_trainer_thought_of_each_token(bus_factory: Any, tmp_path: Path) -> None:
    writer = written(tmp_path)
    loop = Loop(await bus_factory(), tmp_path, steps=4, samples=SampleRecorder(writer, per_step=1), writers=[writer])
    loop.backend = Telling()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine())))
        await loop.run_learner()
    answers = [answer for row in read(tmp_path) if row.fate == "trained" for answer in row.answers]
    assert len(answers) == 4 * loop.group_size
    for answer in answers:
        assert answer.trainer_logprobs == tuple(round(-token / 1000, 4) for token in answer.tokens)
        assert answer.entropies == tuple(float(token) for token in answer.tokens)
