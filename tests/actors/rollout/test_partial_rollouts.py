"""A worker that dies during long answers loses little: another worker resumes its partial rollouts."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus
from asyncrl.engines.generation import Generation
from asyncrl.environments.port import Generate
from asyncrl.messages import Progress, PromptGroup, Trajectory
from asyncrl.messages.topics import PROGRESS, SEGMENTS
from tests.conftest import BUS_SIZES
from tests.harness import fakes
from tests.harness.buses import first_event
from tests.harness.partial_rollouts import Worker, killed_after_a_save, publish_prompt


@pytest.mark.parametrize("killed_at", [300, 701, 1999])
async def test_a_worker_killed_in_the_middle_loses_at_most_a_twentieth(bus: Bus, killed_at: int) -> None:
    """A save every 13 steps leaves out the newest token. Of 300 or more tokens, at most 13/300 = 4.3 % are lost."""
    first_worker, second = Worker(bus, "w0"), Worker(bus, "w1")
    for number in range(2):
        await publish_prompt(bus, number, group_size=3, max_new_tokens=2000)
    async with first_worker.working():
        await first_worker.begun(6)
        for step in range(killed_at):
            if step % 13 == 12:
                await first_worker.partial_rollouts.save()
            await first_worker.engine.steps(1)
        unsaved = first_worker.partial_rollouts.unsaved_tokens
    async with second.working():
        await second.begun(6)
        groups = await second.until_published(bus, 2)
    generated = first_worker.engine.generated
    assert generated == 6 * killed_at
    trained = sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories)
    lost = generated + second.engine.generated - trained
    assert trained == 6 * 2000
    assert 0 < lost <= 0.05 * generated
    assert lost == unsaved
    assert second.partial_rollouts.resumed_tokens == generated - lost


async def test_resumed_tokens_keep_their_logprobs_and_versions(bus: Bus) -> None:
    await publish_prompt(bus, 0)
    async with Worker(bus, "w0", version=3).working() as dying:
        await dying.begun(2)
        await dying.engine.steps(41)
        await dying.partial_rollouts.save()
        sampled = [answer.so_far() for answer in dying.engine.answers]
    async with Worker(bus, "w1", version=5).working() as heir:
        await heir.begun(2)
        (group,) = await heir.until_published(bus, 1)
    for trajectory, had in zip(group.trajectories, sampled, strict=True):
        # of 41 tokens, the newest might have been the last
        assert trajectory.tokens[:40].tolist() == had.tokens[:40].tolist()
        assert trajectory.behavior_logprobs[:40].tolist() == had.logprobs[:40].tolist()
        assert len(trajectory.tokens) == 100
        assert [(span.start, span.policy_version) for span in trajectory.version_spans] == [(0, 3), (40, 5)]
    assert [begin for _, _, begin in heir.engine.asked] == [40, 40]
    event = await first_event(bus, "resumed")
    assert (event.kind, event.actor) == ("resumed", "w1")
    assert event.data == {"group_id": 0, "from": "w0", "tokens": 80, "too_old_tokens": 0}


async def test_a_published_group_leaves_no_segments(bus: Bus) -> None:
    await publish_prompt(bus, 0)
    async with Worker(bus, "w0").working() as worker:
        await worker.begun(2)
        await worker.engine.steps(50)
        await worker.partial_rollouts.save()
        assert (await bus.states(SEGMENTS)).keys() == {"w0/0/1/0", "w0/0/1/begun/0"}
        await worker.partial_rollouts.save()
        await worker.engine.steps(5)
        await worker.partial_rollouts.save()
        assert (await bus.states(SEGMENTS)).keys() == {"w0/0/1/0", "w0/0/1/1", "w0/0/1/begun/0"}
        await worker.until_published(bus, 1)
        await worker.partial_rollouts.save()
        assert await bus.states(SEGMENTS) == {}
    assert worker.partial_rollouts.unsaved_tokens == 0


# -- several turns -----------------------------------------------------------------------------------------------------


async def two_turns(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """Each sample has 10 x (index + 1) tokens, two tokens of a tool, and 50 more tokens."""
    answer = await generate(prompt.prompt_tokens, max_new_tokens=10 * (index + 1))
    said = np.array([4 + len(answer.tokens) % 7, 5], np.int32)
    more = await generate(np.concatenate([prompt.prompt_tokens, answer.tokens, said]), max_new_tokens=50)
    return joined(answer, said, more)


def joined(answer: Generation, said: Any, more: Generation) -> Trajectory:
    mask = np.concatenate([np.ones(len(answer.tokens)), np.zeros(len(said)), np.ones(len(more.tokens))]).astype(bool)
    return Trajectory(
        tokens=np.concatenate([answer.tokens, said, more.tokens]),
        response_mask=mask,
        behavior_logprobs=np.concatenate([answer.logprobs, np.zeros(len(said), np.float32), more.logprobs]),
        version_spans=answer.version_spans,
    )


async def test_finished_calls_are_answered_without_the_engine(bus: Bus) -> None:
    """Killed when sample 0 is done, sample 1 is in its second turn, and sample 8 in its first."""
    await publish_prompt(bus, 0, group_size=9)
    await publish_prompt(bus, 1, group_size=9)
    async with Worker(bus, "w0").working(rollout=two_turns) as dying:
        await dying.begun(18)
        await dying.engine.steps(75)
        for _ in range(10):  # until the newest answers are processed
            await asyncio.sleep(0)
        await dying.partial_rollouts.save()
        finished = {answer.seed for answer in dying.engine.answers if answer.done.done()}
    async with Worker(bus, "w1").working(rollout=two_turns) as heir:
        await heir.begun(1)
        groups = await heir.until_published(bus, 2)
    asked = [seed for seed, _, _ in heir.engine.asked]
    assert finished
    assert finished.isdisjoint(asked)
    assert len(set(asked)) == len(asked)
    for group in groups:
        assert [len(t.tokens) for t in group.trajectories] == [10 * (n + 1) + 2 + 50 for n in range(9)]


async def test_resumed_group_equals_the_uninterrupted_one(bus_factory: Any) -> None:
    bus = await bus_factory()
    await publish_prompt(bus, 0, group_size=4)
    await publish_prompt(bus, 1, group_size=4)
    async with Worker(bus, "w0").working(rollout=two_turns) as dying:
        await dying.begun(8)
        await dying.engine.steps(33)
        await dying.partial_rollouts.save()
        await dying.engine.steps(5)
    async with Worker(bus, "w1").working(rollout=two_turns) as heir:
        resumed = await heir.until_published(bus, 2)
    other = MemoryBus(**BUS_SIZES, max_message_bytes=2**20)
    await publish_prompt(other, 0, group_size=4)
    await publish_prompt(other, 1, group_size=4)
    async with Worker(other, "w2").working(rollout=two_turns) as alone:
        undisturbed = await alone.until_published(other, 2)
    for one, two in zip(by_id(resumed), by_id(undisturbed), strict=True):
        assert [t.tokens.tolist() for t in one.trajectories] == [t.tokens.tolist() for t in two.trajectories]
        assert [t.reward for t in one.trajectories] == [t.reward for t in two.trajectories]


def by_id(groups: list[Any]) -> list[Any]:
    return sorted(groups, key=lambda group: group.group_id)


async def test_second_death_keeps_what_the_first_worker_saved(bus: Bus) -> None:
    """The second worker saves sample 1's longer answer, but dies before sample 0 requests its second turn again."""
    never = asyncio.Event()

    async def turns(prompt: PromptGroup, generate: Generate, *, index: int, hold: bool = False) -> Trajectory:
        answer = await generate(prompt.prompt_tokens, max_new_tokens=300 if index else 50)
        if hold:
            await never.wait()
        return joined(answer, np.array([5], np.int32), await generate(prompt.prompt_tokens[:1]))

    await publish_prompt(bus, 0)
    async with Worker(bus, "w0", max_attempts=5).working(rollout=turns) as dying:
        await dying.begun(2)
        await dying.engine.steps(50)
        await dying.begun(3)
        await dying.engine.steps(60)
        await dying.partial_rollouts.save()
    async with Worker(bus, "w1", max_attempts=5).working(rollout=functools.partial(turns, hold=True)) as also:
        await also.begun(1)
        await also.engine.steps(100)
        await also.partial_rollouts.save()
    async with Worker(bus, "w2", max_attempts=5).working(rollout=turns) as heir:
        await heir.begun(2)
        (group,) = await heir.until_published(bus, 1)
    begins = sorted(begin for _, _, begin in heir.engine.asked)
    assert begins[0] == 0  # sample 1's second turn
    assert begins[1] >= 55  # sample 0's
    assert begins[2] >= 200  # sample 1's first
    assert [len(trajectory.tokens) for trajectory in group.trajectories] == [151, 401]


# -- what is not taken over --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("learner_at", "bound", "begins"), [(7, 4, [40, 40]), (8, 4, [0, 0]), (8, None, [40, 40])])
async def test_resamples_saved_tokens_that_are_too_old(
    bus: Bus, learner_at: int, bound: int | None, begins: list[int]
) -> None:
    """With version 3 and a bound of 4, the step from version 7 is the last that may train it. If tokens are judged
    alone, the tokens that follow are trained."""
    await killed_after_a_save(bus)
    await bus.put(PROGRESS, Progress(incarnation=0, step=learner_at, policy_version=learner_at))
    async with Worker(bus, "w1", version=5, max_staleness=bound).working() as heir:
        await heir.begun(2)
        await heir.until_published(bus, 1)
    assert [begin for _, _, begin in heir.engine.asked] == begins
    assert heir.partial_rollouts.resumed_tokens + heir.partial_rollouts.discarded_tokens == 80


async def test_heartbeat_lists_begun_groups_with_oldest_version(bus: Bus) -> None:
    """The learner waits for old groups. A worker that takes over a group reports the version of the saved tokens."""
    await publish_prompt(bus, 0)
    dead, heir = Worker(bus, "w0", version=3), Worker(bus, "w1", version=5)
    async with dead.working():
        await dead.begun(2)
        assert dead.partial_rollouts.begun_versions() == {"0": 3}
        await dead.engine.steps(20)
        await dead.partial_rollouts.save()
    assert dead.partial_rollouts.begun_versions() == {}
    actors = fakes.worker(bus, heir.engine, name="w1", max_running=64, partial_rollouts=heir.partial_rollouts)
    task = asyncio.create_task(fakes.run_worker(actors))
    await heir.begun(2)
    beat = actors[0].heartbeat()
    assert (beat.policy_version, beat.begun) == (5, {"0": 3})
    task.cancel()
    await asyncio.wait((task,))
