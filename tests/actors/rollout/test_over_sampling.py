"""Over-sampled groups: the first samples to finish form the group, and a deadline accepts fewer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.rollout.group_maker import cut_samples
from asyncrl.actors.rollout.group_rules import GroupRules
from asyncrl.errors import RolloutError
from asyncrl.messages import PromptGroup, Trajectory
from asyncrl.messages.topics import TRAJECTORIES
from tests.harness.buses import first
from tests.harness.fakes import Engine, Loop, run_all, single_turn, worker


async def result(value: object, *, after: asyncio.Event | None = None) -> object:
    if after is not None:
        await after.wait()
    return value


async def test_first_samples_to_finish_form_the_group() -> None:
    never = asyncio.Event()
    samples = [asyncio.create_task(result(index, after=None if index in (1, 3) else never)) for index in range(4)]
    await cut_samples(samples, group_size=2, rules=GroupRules(extra_samples=2))
    await asyncio.wait(samples)
    assert [index for index, sample in enumerate(samples) if not sample.cancelled()] == [1, 3]


async def test_extra_sample_replaces_a_failed_one() -> None:
    never = asyncio.Event()
    values: list[object] = [RolloutError("no"), "a", "b"]
    samples = [asyncio.create_task(result(value)) for value in values]
    samples.append(asyncio.create_task(result("c", after=never)))
    await cut_samples(samples, group_size=2, rules=GroupRules(extra_samples=2))
    await asyncio.wait(samples)
    assert samples[3].cancelled()


async def test_accepts_fewer_samples_after_the_deadline() -> None:
    never, second = asyncio.Event(), asyncio.Event()
    samples = [asyncio.create_task(result(index, after=event)) for index, event in enumerate((None, second, never))]
    cutting = asyncio.create_task(
        cut_samples(samples, group_size=3, rules=GroupRules(group_seconds=0.001, min_group=2))
    )
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, late.set)  # after the deadline, on the same clock
    await late.wait()
    assert not cutting.done()  # one sample is done, two are required
    second.set()
    await cutting
    await asyncio.wait(samples)
    assert [sample.cancelled() for sample in samples] == [False, False, True]


async def half_stuck(prompt: PromptGroup, generate: Any, *, index: int) -> Trajectory:
    """Never finish the first sample of any group."""
    made = await single_turn(prompt, generate, index=index)
    if index == 0:
        await asyncio.Event().wait()
    return made


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
async def test_run_continues_past_samples_that_never_end(bus_factory: Any, tmp_path: Path, mode: Any) -> None:
    loop = Loop(await bus_factory(), tmp_path, mode=mode, group_size=2)
    load = "in_flight" if mode == "async" else "on_demand"
    actors = worker(await bus_factory(), Engine(), load=load, rollout=half_stuck, extra_samples=1)
    await run_all(loop, actors)
    assert loop.trained_groups == 8
    rows = loop.recorder.rows
    assert {row["rollout/extra_samples"] for row in rows} == {2}
    assert {row["staleness/cancelled"] for row in rows} == {0}
    for record in await first(loop.bus, 8, topic=TRAJECTORIES):
        assert [one.rollout for one in record.message.trajectories] == [0, 1]
