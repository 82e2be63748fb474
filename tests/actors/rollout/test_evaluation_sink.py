"""Answers go to their log without tokens unless they are recorded, and wait for its space only while needed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.evaluation_round import EvaluationRound
from asyncrl.actors.rollout import evaluation
from asyncrl.actors.rollout.evaluation import EvaluationSink
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import BusFull
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, WeightVersion, replace
from asyncrl.messages.evaluation import Evaluation
from asyncrl.messages.topics import EVALUATION_ANSWERS
from tests.harness.evaluation import sums

pytestmark = pytest.mark.timeout(600)

CURRENT = Evaluation(number=1, weights=WeightVersion(incarnation=0, policy_version=20), num_prompts=2)


class FullBus(MemoryBus):
    """A bus whose logs have no space until ``has_space``."""

    has_space = False

    def __init__(self) -> None:
        super().__init__(max_prompts=8, max_log_bytes=2**20, ack_seconds=30, max_message_bytes=2**20)
        self.tried = asyncio.Event()

    async def publish(self, *arguments: Any, **named: Any) -> bool:
        if not self.has_space:
            self.tried.set()
            raise BusFull("full")
        return await super().publish(*arguments, **named)


async def votes(dataset: str, answers: TrajectoryGroup) -> list[str]:
    return ["12"] * len(answers.trajectories)


class Worker:
    """The part of a worker that its sink uses, and the sink's source."""

    pinned_seconds = 2.5

    def __init__(self) -> None:
        self.bus = FullBus()
        self.in_progress: Evaluation | None = CURRENT
        self.is_draining = False
        self.prompt = EvaluationRound(CURRENT, [sums(2)]).prompt(0)
        source: Any = self
        self.sink = EvaluationSink(self.bus, worker="w0", source=source, vote=votes, waits=WaitTracker())


def group(index: int = 0, *, length: int = 3, version: int = 20) -> TrajectoryGroup:
    answer = Trajectory(
        tokens=[5] * length,
        response_mask=[True] * length,
        behavior_logprobs=[-0.5] * length,
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=version),),
        experts=np.zeros((length + 1, 1, 1), np.uint8),
        reward=1.0,
        reward_parts={"right": 1.0},
    )
    return TrajectoryGroup(group_id=CURRENT.group_id(index), prompt_tokens=[1], trajectories=(answer,))


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "FULL_LOG_SECONDS", 0.0)


async def test_answer_log_holds_counts_and_no_tokens() -> None:
    worker = Worker()
    worker.bus.has_space = True
    await worker.sink.publish(group(length=10_000), prompt=worker.prompt)
    await worker.sink.publish(group(1, version=21), prompt=worker.prompt)
    async with worker.bus.read(EVALUATION_ANSWERS) as records:
        long, mixed = await anext(records), await anext(records)
    assert long.num_bytes < 512
    (answer,) = long.message.answers
    assert (answer.reward, answer.length, answer.vote, answer.finish_reason) == (1.0, 10_000, "12", "stop")
    assert long.message.pinned_seconds == 2.5
    assert mixed.message.answers[0].version_spans[0].policy_version == 21, "the learner counts these"


async def test_answers_to_recorded_prompts_carry_tokens() -> None:
    worker = Worker()
    worker.bus.has_space = True
    worker.prompt = replace(worker.prompt, recorded_place=7)
    await worker.sink.publish(group(), prompt=worker.prompt)
    async with worker.bus.read(EVALUATION_ANSWERS) as records:
        found = (await anext(records)).message
    assert found.group.trajectories[0].tokens.tolist() == [5, 5, 5]
    assert found.group.trajectories[0].reward_parts == {"right": 1.0}
    assert len(found.group.trajectories[0].experts) == 0, "nobody reads them"
    assert (found.place, found.label) == (7, "1")


async def test_stops_waiting_for_a_full_log_when_evaluation_ends() -> None:
    worker = Worker()
    publishing = asyncio.create_task(worker.sink.publish(group(), prompt=worker.prompt))
    await worker.bus.tried.wait()
    worker.in_progress = None
    await publishing
    assert await worker.bus.last_sequence(EVALUATION_ANSWERS) == 0


async def test_waits_for_space_and_drops_tokens_of_answers() -> None:
    worker = Worker()
    worker.prompt = replace(worker.prompt, recorded_place=7)
    publishing = asyncio.create_task(worker.sink.publish(group(), prompt=worker.prompt))
    await worker.bus.tried.wait()
    worker.bus.has_space = True
    await publishing
    async with worker.bus.read(EVALUATION_ANSWERS) as records:
        assert (await anext(records)).message.group is None
