"""A session's calls: seeds, budgets, versions, and results recorded by an earlier attempt."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollout.generation_session import GenerationSession, sample_seed
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.partial_rollouts import GroupProgress, assemble_calls
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.messages import SamplingParams
from asyncrl.messages.topics import SEGMENTS
from tests.conftest import BUS_SIZES
from tests.harness import fakes

PROMPT = np.array([5, 6], np.int32)


class Engine(fakes.Engine):
    """Records (max_new_tokens, seed, whether it can be followed) of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int, bool]] = []

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        self.asked.append((sampling.max_new_tokens, seed, partial is not None))
        return await super().generate(prompt_tokens, sampling, seed=seed)


class Setup:
    def __init__(self) -> None:
        self.bus = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
        self.engine = Engine()
        follower = WeightFollower("w0.weights", self.bus, engine=self.engine, channel=fakes.Channel(), load="in_flight")
        self.shared = SharedEngine(self.engine, follower=follower, max_running=8)

    def session(self, *, progress: GroupProgress | None = None) -> GenerationSession:
        return GenerationSession(
            self.shared,
            sampling=SamplingParams(max_new_tokens=4),
            need=VersionNeed((0, 0)),
            seed=lambda call: sample_seed(0, 3, 1, call),
            index=1,
            progress=progress,
        )


async def test_each_call_has_its_own_seed_and_budget() -> None:
    setup = Setup()
    session = setup.session()
    await session(PROMPT)
    await session(PROMPT, max_new_tokens=2)
    assert setup.engine.asked == [(4, sample_seed(0, 3, 1, 0), False), (2, sample_seed(0, 3, 1, 1), False)]
    assert (session.num_calls, session.num_tokens) == (2, 8)


async def test_context_of_requests_and_of_trajectories() -> None:
    setup = Setup()
    setup.shared = SharedEngine(
        setup.engine, follower=setup.shared.follower, max_running=8, context_tokens=64, request_tokens=58
    )
    assert setup.session().context_tokens == 58
    assert setup.shared.context_tokens == 64


async def test_session_starts_at_version_of_its_first_call() -> None:
    setup = Setup()
    session = setup.session()
    assert session.first_version is None
    setup.engine.version = (0, 3)
    await session(PROMPT)
    setup.engine.version = (0, 5)
    await session(PROMPT)
    assert session.first_version == 3


async def saved(setup: Setup) -> dict[Any, Generation]:
    """Return what another worker saved of the session's first call, which finished at version 2."""
    setup.engine.version = (0, 2)
    progress = GroupProgress(3, attempt=1)
    await setup.session(progress=progress)(PROMPT)
    await progress.save(setup.bus, worker="other")
    setup.engine.asked.clear()
    setup.engine.version = (0, 4)
    return assemble_calls((await setup.bus.states(SEGMENTS)).values())


async def test_answers_finished_call_from_saved_tokens() -> None:
    setup = Setup()
    progress = GroupProgress(3, attempt=2, recorded=await saved(setup))
    session = setup.session(progress=progress)
    answer = await session(PROMPT)
    assert setup.engine.asked == []
    assert len(answer.tokens) == 4
    assert session.first_version == 2  # the sample's age counts from there


async def test_finds_saved_calls_in_another_order() -> None:
    """The first attempt asked for one, two, two; the second asks for two, one, two and two."""
    setup = Setup()
    one, two = PROMPT, np.array([7], np.int32)
    first = GroupProgress(3, attempt=1)
    session = setup.session(progress=first)
    answers = [await session(tokens) for tokens in (one, two, two)]
    await first.save(setup.bus, worker="other")
    setup.engine.asked.clear()
    progress = GroupProgress(3, attempt=2, recorded=assemble_calls((await setup.bus.states(SEGMENTS)).values()))
    session = setup.session(progress=progress)
    again = [await session(tokens) for tokens in (two, one, two)]
    assert setup.engine.asked == []
    assert [a.tokens.tolist() for a in again] == [answers[place].tokens.tolist() for place in (1, 0, 2)]
    progress.discard_unused()
    assert progress.num_discarded == 0
    more = await session(two)
    assert more.tokens.tolist() not in [a.tokens.tolist() for a in answers]  # never sampled with an earlier seed
