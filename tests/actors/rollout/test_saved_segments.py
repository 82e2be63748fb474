"""Segments of a partial rollout on the bus: each token once, in order, and only those that may be resumed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.rollout.partial_rollouts import GroupProgress, PartialRollouts, assemble_calls
from asyncrl.bus.port import Bus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.messages import PromptGroup, SamplingParams, VersionSpan, replace
from asyncrl.messages.rollout import GroupSegment
from asyncrl.messages.topics import SEGMENTS
from tests.harness.partial_rollouts import (
    FIRST_CALL,
    PROMPT_TOKENS,
    FakeGeneration,
    Worker,
    killed_after_a_save,
    publish_prompt,
)


def begun(progress: GroupProgress, *, length: int = 1000, index: int = 0) -> tuple[PartialGeneration, FakeGeneration]:
    """Return a sample's first call and its answer, resumed from the known tokens."""
    _, partial = progress.begin(index, PROMPT_TOKENS, SamplingParams(max_new_tokens=length))
    done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
    answer = FakeGeneration(seed=0, begin=len(partial.prefix.tokens), length=length, version=(0, 0), done=done)
    partial.follow(answer)
    return partial, answer


async def test_saves_each_token_once(bus: Bus) -> None:
    progress = GroupProgress(0, attempt=1)
    _, answer = begun(progress)
    for _ in range(3):
        answer.tokens += [4] * 100
        await progress.save(bus, worker="w0")
        await progress.save(bus, worker="w0")  # nothing new except the newest token
    segments = await bus.states(SEGMENTS, under="w0/0/1/")
    held = [(key, one.calls[0].start, len(one.calls[0].tokens)) for key, one in sorted(segments.items())]
    assert held == [("w0/0/1/0", 0, 99), ("w0/0/1/1", 99, 100), ("w0/0/1/2", 199, 100)]
    assert progress.num_unsaved == 1


async def test_assembles_segments(bus: Bus) -> None:
    progress = GroupProgress(0, attempt=1)
    partial, answer = begun(progress, length=8)
    for _ in range(4):
        answer.step()
        answer.step()
        if answer.done.done():
            progress.finish(FIRST_CALL, partial, answer.so_far())
        await progress.save(bus, worker="w0")
    found = await bus.states(SEGMENTS)
    assert len(found) == 4
    (call,) = assemble_calls(found[key] for key in sorted(found)).values()
    assert call.tokens.tolist() == answer.so_far().tokens.tolist()
    assert call.version_spans == answer.so_far().version_spans
    assert call.finish_reason == "length"


async def test_two_workers_on_one_group_do_not_mix(bus: Bus) -> None:
    """The first worker was only slow and continues. A third worker resumes all of the second worker's tokens."""
    await publish_prompt(bus, 0)
    sampling = SamplingParams(max_new_tokens=100)
    prompt = PromptGroup(group_id=0, prompt_tokens=PROMPT_TOKENS, group_size=2, sampling=sampling)
    async with Worker(bus, "w0", max_attempts=9).working() as slow:
        await slow.begun(2)
        await slow.engine.steps(21)
        await slow.partial_rollouts.save()
        second = Worker(bus, "w1", max_attempts=9).partial_rollouts
        _, answer = begun(await second.open(prompt, attempt=2), length=100)
        answer.tokens += [13] * 11
        await second.save()
        await slow.engine.steps(50)
        await slow.partial_rollouts.save()
        third = await Worker(bus, "w2", max_attempts=9).partial_rollouts.open(prompt, attempt=3)
        known = [third.begin(index, PROMPT_TOKENS, sampling)[1].prefix.tokens.tolist() for index in range(2)]
        sampled = [answer.tokens[:20] for answer in slow.engine.answers]
    assert known == [sampled[0] + [13] * 10, sampled[1]]  # the second worker had not begun sample 1 again


async def test_segments_of_somebody_who_was_not_lent_the_group_are_none(bus: Bus) -> None:
    """Segments under the right keys, with a proof made with another ticket, a proof of other content, or no proof."""
    sampling = SamplingParams(max_new_tokens=100)
    prompt = PromptGroup(group_id=0, prompt_tokens=PROMPT_TOKENS, group_size=2, sampling=sampling, ticket="ab" * 16)

    async def known() -> int:
        """Return the number of tokens that a worker takes over in the second attempt."""
        progress = await Worker(bus, "w1").partial_rollouts.open(prompt, attempt=2)
        found = len(progress.begin(0, PROMPT_TOKENS, sampling)[1].prefix.tokens)
        assert progress.num_resumed(0) == found
        return found

    async def saved(ticket: str) -> GroupSegment:
        _, answer = begun(progress := GroupProgress(0, attempt=1, ticket=ticket), length=100)
        answer.tokens += [13] * 11
        await progress.save(bus, worker="w0")
        return (await bus.states(SEGMENTS))["w0/0/1/0"]

    honest = await saved("ab" * 16)
    assert await known() == 10
    await saved("cd" * 16)
    assert await known() == 0
    for key, forged in (
        ("w0/0/1/0", replace(honest, worker="evil")),
        ("w0/0/1/0", replace(honest, proof="")),
        ("evil/0/1/0", replace(honest, worker="evil")),
    ):
        await bus.put(SEGMENTS, forged, key=key)
        assert await known() == 0
    await bus.put(SEGMENTS, honest, key="w0/0/1/0")
    assert await known() == 10


@pytest.mark.parametrize("token", [500, 10**6])
async def test_what_the_model_cannot_have_sampled_is_not_taken_over(bus: Bus, token: int) -> None:
    """Somebody with another model, or ill will, saved it; whoever takes the group over would fail it or be blamed."""
    sampling = SamplingParams(max_new_tokens=100)
    prompt = PromptGroup(group_id=0, prompt_tokens=PROMPT_TOKENS, group_size=2, sampling=sampling)
    progress = GroupProgress(0, attempt=1)
    for index, said in ((0, token), (1, 13)):
        begun(progress, length=100, index=index)[1].tokens += [said] * 11
    await progress.save(bus, worker="w0")
    heir = PartialRollouts(bus, worker="w1", seconds=1.0, max_attempts=3, vocabulary_size=500)
    resumed = await heir.open(prompt, attempt=2)
    assert [len(resumed.begin(index, PROMPT_TOKENS, sampling)[1].prefix.tokens) for index in range(2)] == [0, 10]


async def test_accepts_engine_that_ignores_saved_tokens(bus: Bus) -> None:
    await killed_after_a_save(bus)
    heir = Worker(bus, "w1")
    generate = heir.engine.generate

    async def ignoring(tokens: Any, sampling: SamplingParams, *, seed: int, partial: PartialGeneration) -> Generation:
        made = await generate(tokens, sampling, seed=seed + 1)
        await heir.partial_rollouts.save()
        return made

    heir.engine.generate = ignoring  # type: ignore[assignment]
    async with heir.working():
        await heir.begun(2)
        (group,) = await heir.until_published(bus, 1)
    assert [len(trajectory.tokens) for trajectory in group.trajectories] == [100, 100]
    assert (heir.partial_rollouts.resumed_tokens, heir.partial_rollouts.discarded_tokens) == (0, 80)


def test_joins_prefix_and_continuation() -> None:
    spans = tuple(VersionSpan(start=start, incarnation=0, policy_version=start) for start in (0, 3, 4, 8))
    tokens = np.arange(10, dtype=np.int32)
    whole = Generation(tokens=tokens, logprobs=-tokens.astype(np.float32), version_spans=spans, finish_reason="stop")
    for count in range(1, 10):
        again = whole.first(count).then(whole.after(count))
        assert again.tokens.tolist() == tokens.tolist()
        assert again.version_spans == spans
        assert whole.after(count).version_spans[0].start == 0
        assert again.finish_reason == "stop"
