"""However a run ends, it can be resumed once the cause of its end is mended: what it lived through counts no more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config.run import AlgorithmSection
from asyncrl.engines.generation import Generation
from asyncrl.errors import BackendError, EngineError, HopelessError, RewardError
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.groups.logprob_mismatch import LogprobMismatch
from asyncrl.policies.groups.validation import GroupValidation
from asyncrl.rewards.port import Reward, Sample
from tests.actors.learner.test_validator import Liar, Trainer
from tests.conftest import BUS_SIZES
from tests.harness.fakes import Engine, Judge, Loop, run_worker, worker

HEALTHY_STEPS = 3
STEPS = 16


def scores(samples: Sequence[Sample]) -> Sequence[Reward]:
    return [Reward(value=1.0 + at) for at in range(len(samples))]


def zeros(samples: Sequence[Sample]) -> Sequence[Reward]:
    return [Reward(value=0.0) for _ in samples]


def raises(samples: Sequence[Sample]) -> Sequence[Reward]:
    raise RewardError("reward my: raised ModuleNotFoundError: no module named 'judge'")


class Garbage(Engine):
    """An engine of another model: its tokens are outside the vocabulary."""

    async def generate(self, prompt_tokens: Any, sampling: Any, *, seed: int, partial: Any = None) -> Generation:
        made = await super().generate(prompt_tokens, sampling, seed=seed)
        return Generation(
            tokens=np.full(4, 10**6, np.int32),
            logprobs=made.logprobs,
            version_spans=made.version_spans,
            finish_reason="stop",
        )


class Broken(Engine):
    async def generate(self, prompt_tokens: Any, sampling: Any, *, seed: int, partial: Any = None) -> Generation:
        raise EngineError("CUDA error: an illegal memory access was encountered")


def has_signal(group: TrajectoryGroup) -> bool:
    return any(group.rewards)


def needs_signal(group: TrajectoryGroup) -> bool:
    return bool(1 / max(group.rewards))


def fails(step: int) -> None:
    raise ValueError("a bug in the user's loss")


def dies(step: int) -> None:
    raise BackendError("out of memory")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A way to end a run. The trouble begins after HEALTHY_STEPS, and is mended before the run is resumed.

    why     what the run says;  "": it is interrupted from outside (``stop``)
    reward, engine  of the worker while the trouble lasts
    step    what the backend's step does then;  skips: whether it changes no weights
    loop    settings of the run, trouble or not;  mended: changed ones with which it is resumed
    """

    why: str = ""
    reward: Callable[[Sequence[Sample]], Sequence[Reward]] = scores
    engine: type[Engine] = Engine
    step: Callable[[int], None] | None = None
    skips: bool = False
    loop: dict[str, Any] = field(default_factory=dict)
    mended: dict[str, Any] = field(default_factory=dict)
    stop: Callable[[Loop, asyncio.Task[Any]], Any] = lambda loop, running: running.cancel()
    is_bus_lost: bool = False


ENDINGS = {
    "cap of failures": Ending(why="last 8 groups were all failed", reward=raises),
    "cap of filters": Ending(
        why="algorithm.filter_cap: 4 groups",
        reward=zeros,
        loop={
            "filters": {"signal": has_signal},
            "algorithm_section": AlgorithmSection(filters=("signal",), filter_cap=4),
        },
    ),
    "filtered in a row": Ending(
        why="the last 6 groups were all filtered",
        reward=zeros,
        loop={"filters": {"signal": has_signal}, "max_filtered_in_a_row": 6},
    ),
    "filter that raises": Ending(
        why="a filter raised on each of the last 8 groups", reward=zeros, loop={"filters": {"mine": needs_signal}}
    ),
    "every worker sends another model's tokens": Ending(why="every rollout worker is quarantined", engine=Garbage),
    "every worker sends wrong logprobs": Ending(
        why="every rollout worker is quarantined", engine=Liar, loop={"max_staleness": 0}
    ),
    "engine that fails every request": Ending(why="gave up after 3 attempts", engine=Broken),
    "two batches that cannot be trained": Ending(why="two batches in a row could not be trained", step=fails),
    "learner that dies": Ending(why="out of memory", step=dies),
    "steps that are not finite": Ending(why="too many steps were skipped", skips=True, loop={"max_skipped_steps": 2}),
    "drained": Ending(stop=lambda loop, running: loop.learner.drain()),
    "killed": Ending(),
    "finished, and then to go on for longer": Ending(loop={"steps": HEALTHY_STEPS + 1}, mended={"steps": STEPS}),
    "bus whose store was deleted": Ending(is_bus_lost=True),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_run_that_ended_goes_on_once_its_cause_is_mended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = ENDINGS[name]
    monkeypatch.setattr("asyncrl.actors.rollout.prompt_deliveries.RETRY_SECONDS", 0.001)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    troubled = make_loop(bus, tmp_path, **ending.loop)
    is_in_trouble = asyncio.Event()
    loop = asyncio.get_running_loop()

    def before_step(step: int) -> None:
        if step >= HEALTHY_STEPS:
            loop.call_soon_threadsafe(is_in_trouble.set)
            if ending.step is not None:
                ending.step(step)

    troubled.backend.before_step = before_step
    troubled.backend.measures = lambda step: {
        "learner/skipped_steps": float(ending.skips and step > HEALTHY_STEPS),
        "loss": math.nan if ending.skips else 1.0,
    }
    await until_it_ends(troubled, ending, is_in_trouble)
    if ending.is_bus_lost:
        bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    mended = make_loop(bus, tmp_path, **(ending.loop | ending.mended))
    helping = asyncio.create_task(run_worker(worker(bus, Engine(), reward=Judge(scores), keep_seconds=0.1)))
    await mended.run_learner(resume=True)
    await helping
    assert mended.backend.steps == STEPS
    assert not mended.validator.quarantined  # type: ignore[union-attr]


def make_loop(bus: MemoryBus, directory: Path, **changes: Any) -> Loop:
    validator = Validator(
        bus, validation=GroupValidation(vocabulary_size=14), logprob_check=LogprobMismatch(bound=0.5, every=1)
    )
    settings: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 1, "max_failed_in_a_row": 8, "validator": validator}
    made = Loop(bus, directory, **(settings | changes))
    made.backend = Trainer()
    return made


async def until_it_ends(loop: Loop, ending: Ending, is_in_trouble: asyncio.Event) -> None:
    """Run until HEALTHY_STEPS are done, and then with the trouble until the run ends."""
    healthy = asyncio.create_task(run_worker(worker(loop.bus, Engine(), reward=Judge(scores), keep_seconds=0.1)))
    running = asyncio.create_task(loop.run_learner())
    await asyncio.wait((running, asyncio.create_task(is_in_trouble.wait())), return_when=asyncio.FIRST_COMPLETED)
    workers = [healthy]
    if ending.reward is not scores or ending.engine is not Engine:
        healthy.cancel()
        await asyncio.wait((healthy,))
        troubled = worker(loop.bus, ending.engine(), reward=Judge(ending.reward), keep_seconds=0.1)
        workers.append(asyncio.create_task(run_worker(troubled)))
    if ending.why:
        with pytest.raises((HopelessError, BackendError), match=ending.why):
            await running
    elif not running.done():
        ending.stop(loop, running)
        await asyncio.wait((running,))
    for task in workers:
        task.cancel()
    await asyncio.wait(workers)
