"""A slow reward holds no engine slot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.rewards.port import Reward, Sample
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.buses import publish_prompts

NUM_GROUPS = 5


class SlowJudge:
    """Returns no reward until the test allows it."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        self.asked += 1
        await self.may_answer.wait()
        return [Reward(value=1.0)] * len(samples)

    async def close(self) -> None:
        pass


async def test_engine_generates_while_rewards_are_computed() -> None:
    """With slots for only one group, all groups are generated before the first reward arrives."""
    bus, judge = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES), SlowJudge()
    await publish_prompts(bus, *range(NUM_GROUPS))
    worker, follower = fakes.worker(bus, fakes.Engine(), reward=judge, max_running=2)
    running = asyncio.create_task(fakes.run_worker((worker, follower)))
    await fakes.until(lambda: judge.asked == NUM_GROUPS)
    assert await bus.last_sequence(TRAJECTORIES) == 0, "no group has its reward"
    judge.may_answer.set()
    worker.drain()
    await running
    assert await bus.last_sequence(TRAJECTORIES) == NUM_GROUPS
