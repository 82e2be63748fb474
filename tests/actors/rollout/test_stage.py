"""A second source and sink run alongside training on the same engine and slots; no training file refers to them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.stage import Stage
from asyncrl.actors.rollout.training import training_stage
from asyncrl.actors.rollout.weight_follower import VersionNeed, WeightFollower
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus, Delivery
from asyncrl.engines.generation import Generation
from asyncrl.environments.builtin import single_turn
from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.topics import PROMPTS, Topic
from asyncrl.rewards.port import Reward
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.buses import first, publish_prompts, taken

SAMPLING = SamplingParams(max_new_tokens=4)


def memory_bus() -> MemoryBus:
    return MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)


# -- an evaluation: prompts from its own topic, results into its own log -----------------------------------------------

EVALUATION = Topic("evaluation", "work", PromptGroup)
SCORES = Topic("scores", "log", TrajectoryGroup)


@dataclass(frozen=True)
class EvaluationWork:
    """One prompt of the evaluation; a failed attempt is repeated."""

    delivery: Delivery[PromptGroup]
    problem: str = ""
    is_last_attempt: bool = False
    needs_worker_alone: bool = False

    @property
    def group_id(self) -> int:
        return int(self.delivery.key)

    @property
    def prompt(self) -> PromptGroup | None:
        return self.delivery.message

    @property
    def attempt(self) -> int:
        return self.delivery.attempt

    async def begin(self) -> None:
        return None

    async def finish(self) -> None:
        await self.delivery.ack()

    async def retry(self) -> None:
        await self.delivery.retry()

    async def give_back(self) -> None:
        await self.delivery.retry()

    def close(self) -> None:
        pass


class EvaluationSource:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._draining = asyncio.Event()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with self._bus.consume(EVALUATION) as self._deliveries:
            yield

    async def next(self) -> EvaluationWork | None:
        taking = asyncio.ensure_future(anext(aiter(self._deliveries)))
        drained = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((taking, drained), return_when=asyncio.FIRST_COMPLETED)
            return EvaluationWork(taking.result()) if taking.done() else None
        finally:
            taking.cancel()
            drained.cancel()

    def drain(self) -> None:
        self._draining.set()


@dataclass
class EvaluationSink:
    bus: Bus

    async def publish(self, group: TrajectoryGroup, *, prompt: PromptGroup | None) -> None:
        await self.bus.publish(SCORES, group, key=str(group.group_id))


def evaluation(bus: Bus, engine: SharedEngine, *, of_version: int = 0) -> Stage:
    """Begins once the engine has version ``of_version``, whatever version the prompts ask for."""
    maker = GroupMaker(
        "w0",
        engine,
        rollout=single_turn,
        reward=fakes.Judge(lambda samples: [Reward(value=1.0)] * len(samples)),
        tokenizer=fakes.Tokenizer(),
        seed=1,
        need=lambda prompt: VersionNeed((prompt.incarnation, of_version)),
    )
    return Stage("evaluation", maker=maker, source=EvaluationSource(bus), sink=EvaluationSink(bus))


# -- an endpoint: an agent opens a session and asks; no prompt is delivered --------------------------------------------


@dataclass
class AgentSession:
    """One agent's session as the endpoint sees it; also the WorkItem."""

    group_id: int
    prompt: PromptGroup
    questions: asyncio.Queue[NDArray[np.int32] | None] = field(default_factory=asyncio.Queue)
    answers: asyncio.Queue[Generation] = field(default_factory=asyncio.Queue)
    result: asyncio.Future[TrajectoryGroup] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    problem: str = ""
    attempt: int = 1
    is_last_attempt: bool = True
    needs_worker_alone: bool = False

    async def ask(self, tokens: list[int]) -> Generation:
        await self.questions.put(np.array(tokens, np.int32))
        return await self.answers.get()

    async def end(self) -> TrajectoryGroup:
        await self.questions.put(None)
        return await self.result

    async def begin(self) -> None:
        return None

    async def finish(self) -> None:
        pass

    async def retry(self) -> None:
        raise AssertionError("the last attempt is never made again")

    async def give_back(self) -> None:
        raise AssertionError("nobody else has this agent")

    def close(self) -> None:
        pass


class Endpoint:
    """Source, rollout function and sink of agents' sessions."""

    def __init__(self) -> None:
        self._opened: asyncio.Queue[AgentSession | None] = asyncio.Queue()
        self._sessions: list[AgentSession] = []

    def session(self, tokens: list[int]) -> AgentSession:
        """Return the session that a request would open."""
        number = len(self._sessions)
        prompt = PromptGroup(group_id=number, prompt_tokens=tokens, group_size=1, sampling=SAMPLING)
        self._sessions.append(AgentSession(number, prompt))
        self._opened.put_nowait(self._sessions[-1])
        return self._sessions[-1]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield

    async def next(self) -> AgentSession | None:
        return await self._opened.get()

    def drain(self) -> None:
        self._opened.put_nowait(None)

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        session, turns = self._sessions[prompt.group_id], TrajectoryBuilder(prompt.prompt_tokens)
        while (question := await session.questions.get()) is not None:
            turns.observed(question)
            await session.answers.put(turns.answered(await generate(turns.tokens)))
        return turns.trajectory(reward=0.5)

    async def publish(self, group: TrajectoryGroup, *, prompt: PromptGroup | None) -> None:
        self._sessions[group.group_id].result.set_result(group)


def endpoint_stage(endpoint: Endpoint, engine: SharedEngine) -> Stage:
    maker = GroupMaker(
        "w0",
        engine,
        rollout=endpoint,
        reward=fakes.Judge(lambda samples: [Reward(value=sample.trajectory.reward) for sample in samples]),
        tokenizer=fakes.Tokenizer(),
        seed=2,
    )
    return Stage("endpoint", maker=maker, source=endpoint, sink=endpoint)


# -- beside training ---------------------------------------------------------------------------------------------------

Stages = Callable[[SharedEngine], list[Stage]]


@contextlib.asynccontextmanager
async def working(
    bus: Bus, engine: fakes.Engine, beside: Stages, *, max_running: int = 8, max_attempts: int = 3
) -> AsyncIterator[tuple[RolloutWorker, asyncio.Task[None]]]:
    """A worker with the training stage and the stages in ``beside``, killed at the end of the block."""
    follower = WeightFollower(
        "w0.weights", bus, engine=engine, channel=fakes.Channel(), load="in_flight", max_staleness=2
    )
    shared = SharedEngine(engine, follower=follower, max_running=max_running)
    partial = PartialRollouts(bus, worker="w0", seconds=0, max_attempts=max_attempts, max_staleness=2)
    maker = GroupMaker(
        "w0",
        shared,
        rollout=single_turn,
        reward=fakes.Judge(fakes.token_sum),
        tokenizer=fakes.Tokenizer(),
        seed=0,
    )
    training = training_stage(bus, maker, max_attempts=max_attempts, keep_seconds=10.0, partial_rollouts=partial)
    worker = RolloutWorker("w0", bus, engine=shared, stages=[training, *beside(shared)], partial_rollouts=partial)
    task = asyncio.create_task(fakes.run_worker((worker, follower)))
    try:
        yield worker, task
    finally:
        task.cancel()
        await asyncio.wait((task,))


def question(number: int, *, group_size: int = 2) -> PromptGroup:
    return PromptGroup(group_id=number, prompt_tokens=[7, number], group_size=group_size, sampling=SAMPLING)


async def settle() -> None:
    """Wait long enough for every group that may begin to begin."""
    for _ in range(50):
        await asyncio.sleep(0)


async def evaluate(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(EVALUATION, question(number), key=str(number))


async def test_an_evaluation_runs_beside_training_on_the_same_engine(tmp_path: Path) -> None:
    """Its groups share ids with training's, but neither stage sees the other's groups. The last step waits for its
    scores."""
    bus, scored = memory_bus(), threading.Event()
    loop = fakes.Loop(bus, tmp_path, steps=4)
    loop.backend.before_step = lambda step: scored.wait(60) if step == 3 else None
    await evaluate(bus, 0, 1, 2)
    async with working(bus, fakes.Engine(), lambda engine: [evaluation(bus, engine, of_version=2)]):
        learner = asyncio.create_task(loop.run_learner())
        scores = await first(bus, 3, topic=SCORES)
        scored.set()
        await learner
    assert loop.trained_groups == 8
    assert await bus.depth(EVALUATION) == 0
    assert {record.key for record in scores} == {"0", "1", "2"}
    assert all([one.reward for one in record.message.trajectories] == [1.0, 1.0] for record in scores)
    assert min(span.policy_version for record in scores for span in spans(record.message)) >= 2


def spans(group: TrajectoryGroup) -> list[VersionSpan]:
    return [span for trajectory in group.trajectories for span in trajectory.version_spans]


async def test_an_agent_opens_a_session_without_a_prompt_delivery() -> None:
    bus, endpoint = memory_bus(), Endpoint()
    await publish_prompts(bus, 0, 1)
    async with working(bus, fakes.Engine(), lambda engine: [endpoint_stage(endpoint, engine)]):
        session = endpoint.session([5])
        answers = [await session.ask([6]), await session.ask([7, 8])]
        group = await session.end()
        records = await first(bus, 2)  # training continues
    (trajectory,) = group.trajectories
    said = [6, *answers[0].tokens.tolist(), 7, 8, *answers[1].tokens.tolist()]
    assert trajectory.tokens.tolist() == said
    assert trajectory.response_mask.tolist() == [False] + [True] * 4 + [False] * 2 + [True] * 4
    assert trajectory.reward == 0.5
    assert answers[0].tokens.tolist() != answers[1].tokens.tolist()  # each call has a different seed
    assert {record.key for record in records} == {"0", "1"}


async def test_stages_share_the_slots() -> None:
    """Two slots, groups of two: while the group of one stage runs, that of the other waits."""
    bus, engine = memory_bus(), fakes.Engine()
    engine.gate.clear()
    await evaluate(bus, 0)
    async with working(bus, engine, lambda shared: [evaluation(bus, shared)], max_running=2):
        await fakes.until(lambda: engine.running == 2)
        await publish_prompts(bus, 1)
        await settle()
        assert engine.running == 2
        engine.gate.set()
        await first(bus, 1)
        await first(bus, 1, topic=SCORES)


async def test_last_attempt_has_the_worker_alone_across_stages() -> None:
    """W4 across stages: it waits for the evaluation's samples, and the evaluation begins nothing until it ends."""
    bus, engine = memory_bus(), fakes.Engine()
    engine.gate.clear()
    await publish_prompts(bus, 1)
    async with working(bus, engine, lambda _: [], max_attempts=2):
        await fakes.until(lambda: engine.running == 2)
    async with taken(bus, 1):  # the second delivery, which never begins
        pass
    async with working(bus, engine, lambda _: [], max_attempts=3):  # the second attempt
        await fakes.until(lambda: engine.running == 2)
    await evaluate(bus, 0)
    async with working(bus, engine, lambda shared: [evaluation(bus, shared)], max_attempts=3) as (worker, _):
        slots = worker._engine.slots
        await fakes.until(lambda: engine.running == 2 and slots.is_reserved)
        await evaluate(bus, 2)
        await settle()
        assert engine.running == 2
        engine.gate.set()
        (record,) = await first(bus, 1)
        assert record.message.error == ""
        await first(bus, 2, topic=SCORES)


async def test_draining_ends_every_stage() -> None:
    bus, engine = memory_bus(), fakes.Engine()
    engine.gate.clear()
    await evaluate(bus, 0)
    await publish_prompts(bus, 1)
    async with working(bus, engine, lambda shared: [evaluation(bus, shared)]) as (worker, task):
        await fakes.until(lambda: engine.running == 4)
        worker.drain()
        await settle()
        await evaluate(bus, 2)
        await publish_prompts(bus, 3)
        engine.gate.set()
        await task
    assert await bus.keys(PROMPTS) == {"3"}
    assert await bus.keys(EVALUATION) == {"2"}


async def test_broken_stage_ends_the_worker(caplog: Any) -> None:
    """One process, one failure domain."""

    class Broken(EvaluationSource):
        async def next(self) -> EvaluationWork | None:
            raise RuntimeError("no such topic")

    bus = memory_bus()

    def broken(engine: SharedEngine) -> list[Stage]:
        stage = evaluation(bus, engine)
        stage._source = Broken(bus)
        return [stage]

    async with working(bus, fakes.Engine(), broken) as (_, task):
        await asyncio.wait((task,))
        assert isinstance(task.exception(), RuntimeError)
