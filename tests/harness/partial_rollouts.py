"""An engine that decodes on request, and workers on it that the test kills."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.bus.port import Bus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.messages import PromptGroup, SamplingParams, TrajectoryGroup, VersionSpan
from asyncrl.messages.topics import PROMPTS, SEGMENTS, TRAJECTORIES
from tests.harness import fakes
from tests.harness.buses import first

MAX_STALENESS = 4
PROMPT_TOKENS = np.array([5, 6, 4], np.int32)  # prompt of group 0
FIRST_CALL = (0, hashlib.sha256(PROMPT_TOKENS.tobytes()).digest(), 0)  # key of sample 0


@dataclass(eq=False)
class FakeGeneration:
    """Token n depends only on the seed and position n, whichever worker samples it."""

    seed: int
    begin: int
    length: int
    version: tuple[int, int]
    done: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def so_far(self, begin: int = 0) -> Generation:
        tokens = np.array(self.tokens[begin:], np.int32)
        spans = (VersionSpan(start=0, incarnation=self.version[0], policy_version=self.version[1]),)
        return Generation(
            tokens=tokens,
            logprobs=-(tokens / 16).astype(np.float32),
            version_spans=spans if len(tokens) else (),
            finish_reason="length" if self.begin + len(self.tokens) == self.length else "",
        )

    def step(self) -> None:
        self.tokens.append(4 + zlib.crc32(f"{self.seed} {self.begin + len(self.tokens)}".encode()) % 10)
        if self.so_far().finish_reason and not self.done.done():
            self.done.set_result(self.so_far())


class StepEngine(fakes.Engine):
    """``asked``: (seed, number of prompt tokens, number of prefix tokens) of each generation."""

    def __init__(self, version: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.version = version
        self.answers: list[FakeGeneration] = []
        self.asked: list[tuple[int, int, int]] = []

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        partial = PartialGeneration() if partial is None else partial
        begin = len(partial.prefix.tokens)
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        answer = FakeGeneration(seed=seed, begin=begin, length=sampling.max_new_tokens, version=self.version, done=done)
        self.answers.append(answer)
        self.asked.append((seed, len(prompt_tokens), begin))
        partial.follow(answer)
        return partial.prefix.then(await done)

    @property
    def generated(self) -> int:
        return sum(len(answer) for answer in self.answers)

    async def steps(self, count: int) -> None:
        """Decode ``count`` tokens for every answer in progress, including answers that begin in the meantime."""
        for _ in range(count):
            for answer in self.answers:
                if not answer.done.done():
                    answer.step()
            await asyncio.sleep(0)


class Worker:
    """A worker on an engine of its own. The test triggers its periodic saves, not the clock."""

    def __init__(self, bus: Bus, name: str, *, version: int = 0, max_attempts: int = 3, **changes: Any) -> None:
        self.engine = StepEngine((0, version))
        settings = {"seconds": 1e6, "max_staleness": MAX_STALENESS} | changes
        self.partial_rollouts = PartialRollouts(bus, worker=name, max_attempts=max_attempts, **settings)
        self._bus, self._name, self._max_attempts = bus, name, max_attempts

    @contextlib.asynccontextmanager
    async def working(self, **changes: Any) -> AsyncIterator[Worker]:
        """Run until the end of the block, then kill the worker."""
        actors = fakes.worker(
            self._bus,
            self.engine,
            name=self._name,
            max_attempts=self._max_attempts,
            max_running=64,
            partial_rollouts=self.partial_rollouts,
            **changes,
        )
        _, self.follower = actors
        task = asyncio.create_task(fakes.run_worker(actors))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def begun(self, count: int) -> None:
        await fakes.until(lambda: len(self.engine.answers) >= count)

    async def until_published(self, bus: Bus, count: int) -> list[TrajectoryGroup]:
        """Decode until ``count`` groups are in the log and this worker's saved segments are deleted."""
        reading = asyncio.create_task(first(bus, count, topic=TRAJECTORIES))
        while not reading.done() or await bus.states(SEGMENTS, under=f"{self._name}/"):
            await self.engine.steps(1)
            await asyncio.sleep(0.0001)
        return [record.message for record in await reading]


async def publish_prompt(
    bus: Bus, number: int, *, group_size: int = 2, max_new_tokens: int = 100, again: bool = False
) -> None:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    prompt = PromptGroup(
        group_id=number, prompt_tokens=[5, 6, 4 + number], group_size=group_size, sampling=sampling, label=0
    )
    await bus.publish(PROMPTS, prompt, key=str(number), again=again)


async def killed_after_a_save(bus: Bus, **options: Any) -> None:
    await publish_prompt(bus, 0)
    async with Worker(bus, "w0", version=3, **options).working() as dying:
        await dying.begun(2)
        await dying.engine.steps(41)
        await dying.partial_rollouts.save()
