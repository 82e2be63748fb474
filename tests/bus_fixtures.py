"""Messages and moves that the bus tests share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from asyncrl.messages import Heartbeat, Progress, PromptGroup, Sampling, Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.protocols import Bus, Delivery, Record
from asyncrl.topics import PROMPTS, TRAJECTORIES, Topic

SHORT = 0.5  # ack_seconds of a bus whose consumers may be silent


def prompt(number: int) -> PromptGroup:
    return PromptGroup(
        group_id=number, prompt_tokens=[5, 6, number], group_size=2, sampling=Sampling(max_new_tokens=4), label="12"
    )


def group(number: int, *, tokens: int = 3) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=np.arange(tokens, dtype=np.int32),
        response_mask=np.arange(tokens) % 2 == 0,
        behavior_logprobs=np.linspace(-2, 0, tokens, dtype=np.float32),
        version_spans=(VersionSpan(start=0, run_epoch=1, policy_version=7),),
        reward=0.5,
    )
    return TrajectoryGroup(group_id=number, prompt_tokens=[1, 2], trajectories=(trajectory,))


def progress(step: int) -> Progress:
    return Progress(run_epoch=0, step=step, policy_version=step)


def heartbeat(name: str) -> Heartbeat:
    return Heartbeat(actor=name, role="rollout-worker")


async def publish_prompts(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(PROMPTS, prompt(number), key=str(number))


async def publish_groups(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(TRAJECTORIES, group(number), key=str(number))


@contextlib.asynccontextmanager
async def taken(bus: Bus, count: int) -> AsyncIterator[list[Delivery[PromptGroup]]]:
    async with bus.consume(PROMPTS) as deliveries:
        yield [await anext(deliveries) for _ in range(count)]


async def first(bus: Bus, count: int, *, after: int = 0, topic: Topic[Any] = TRAJECTORIES) -> list[Record[Any]]:
    async with bus.read(topic, after=after) as records:
        return [await anext(records) for _ in range(count)]


def group_ids(deliveries: list[Delivery[PromptGroup]]) -> set[int]:
    return {delivery.message.group_id for delivery in deliveries if delivery.message is not None}
