"""Content that no message can hold fails its group, but not the worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.actors.rollout.training import TrainingSink
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.rollout import failed_group


class Bus:
    """Records published messages, encoded and decoded again."""

    def __init__(self) -> None:
        self.published: list[TrajectoryGroup] = []

    async def publish(self, topic: Any, group: TrajectoryGroup, *, key: str) -> None:
        self.published.append(decode(encode(group), TrajectoryGroup))


async def test_text_that_cannot_be_encoded_fails_its_group() -> None:
    bus: Any = Bus()
    sink = TrainingSink(bus, worker="w1", waits=WaitTracker())
    one = Trajectory(
        tokens=np.array([1], np.int32),
        response_mask=np.array([True]),
        behavior_logprobs=np.array([-1.0], np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=0),),
        reward=1.0,
        reward_parts={"\ud800": 1.0},
    )
    group = TrajectoryGroup(group_id=3, prompt_tokens=np.array([1], np.int32), trajectories=(one,))
    await sink.publish(group, prompt=None)
    await sink.publish(failed_group(4, worker="w1", error="it said \ud800"), prompt=None)
    assert [(made.group_id, made.trajectories) for made in bus.published] == [(3, ()), (4, ())]
    assert "cannot send this" in bus.published[0].error
    assert bus.published[1].error == "it said ?"
