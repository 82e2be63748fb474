"""Prompts that a dead learner leaves on ``prompts`` can be begun with the existing weights by the next incarnation."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.environments.builtin import single_turn
from asyncrl.messages import PromptGroup, SamplingParams, WeightVersion
from asyncrl.messages.topics import PROMPTS, WEIGHTS
from asyncrl.policies.staleness.admission import Admission, version_to_begin
from asyncrl.tensors.snapshot import Snapshot
from tests.harness import fakes
from tests.harness.fakes import Engine, Loop, run_worker, until, worker

# -- admission, pure ---------------------------------------------------------------------------------------------------

modes = st.sampled_from([("sync", 0), ("one_step_off", 1), ("async", 0), ("async", 1), ("async", 3)])


@given(modes, st.integers(1, 4), st.lists(st.sampled_from(["step", "announce", "lose"]), max_size=60), st.data())
def test_a_group_asks_for_a_version_that_is_there_and_young_enough_for_its_batch(
    mode: tuple[str, int], size: int, acts: list[str], data: st.DataObject
) -> None:
    """This holds however late versions are announced, and however many are skipped.

    The n-th group that is not lost belongs to batch n // size, which version n // size trains.
    """
    name, bound = mode
    rule = Admission(mode=name, groups_per_batch=size, max_staleness=bound, total_groups=10**6)
    published = lost = steps = announced = 0
    for act in ["", *acts]:
        if act == "step" and published - lost >= size * (steps + 1):
            steps += 1
        elif act == "announce":
            announced = data.draw(st.integers(announced, steps))
        elif act == "lose" and published - lost > size * steps:
            lost += 1
        has_batch = published - lost >= size * (steps + 1)
        count = rule.may_publish(
            published=published, lost=lost, batches_taken=steps + has_batch, steps_done=steps, obtainable=announced
        )
        asked = min(steps, announced)
        for _ in range(count):
            assert asked <= announced
            assert (published - lost) // size - asked <= bound
            published += 1


@pytest.mark.parametrize(
    ("asked", "engine_incarnation", "expected"),
    [
        (25, 0, 25),  # the incarnation that published it
        (25, 1, 12),  # fell back to 10: samples up to version 10 can be trained until the step from 11
        (11, 1, 11),  # the log brings the new history there
        (3, 1, 3),
    ],
)
def test_a_group_of_a_rolled_back_version_begins_where_the_log_has_nothing_left_before_it(
    asked: int, engine_incarnation: int, expected: int
) -> None:
    assert (
        version_to_begin(asked, incarnation=0, engine_incarnation=engine_incarnation, resumed_from=10, max_staleness=1)
        == expected
    )


def test_after_a_fallback_no_group_waits_for_a_version_that_no_step_announces() -> None:
    """Fell back to 10 with a bound of 3: the log reaches version 14, and of every fourth version 12 is the last."""
    begins = partial(version_to_begin, incarnation=0, resumed_from=10, max_staleness=3, every_steps=4)
    assert begins(24, engine_incarnation=1) == 12
    assert begins(12, engine_incarnation=1) == 12
    assert begins(24, engine_incarnation=0) == 24  # announced by the incarnation that published the group


# -- the actors --------------------------------------------------------------------------------------------------------


async def test_no_prompt_asks_for_weights_that_nobody_can_get(
    bus_factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing version 3 blocks until the test allows it. Until then, the learner keeps the prompts that steps 3 and
    later release."""
    may_write = threading.Event()
    publish = fakes.Channel.publish

    def write(self: fakes.Channel, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        if policy_version >= 3:
            assert may_write.wait(timeout=60)
        return publish(self, snapshot, incarnation=incarnation, policy_version=policy_version)

    monkeypatch.setattr(fakes.Channel, "publish", write)
    asked: list[int] = []

    async def rollout(prompt: PromptGroup, generate: Any, *, index: int) -> Any:
        asked.append(prompt.min_policy_version)
        return await single_turn(prompt, generate, index=index)

    loop = Loop(await bus_factory(), tmp_path, steps=8, max_staleness=1)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), Engine(), rollout=rollout)))
        learner = group.create_task(loop.run_learner())
        await until(lambda: hasattr(loop, "learner") and loop.learner.step == 4)  # versions 0 to 2, and one more batch
        assert await loop.bus.last_sequence(PROMPTS) == 2 * (2 + 1 + 1)
        assert set(asked) <= {0, 1, 2}
        may_write.set()
        await learner
    assert loop.backend.steps == 8


class Stuck(Engine):
    """Never finishes generations that begin on version 5 or newer."""

    async def generate(
        self,
        prompt_tokens: NDArray[Any],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        if self.version[1] >= 5:
            self.gate.clear()
        return await super().generate(prompt_tokens, sampling, seed=seed, partial=partial)


async def killed_life(bus_factory: Any, folder: Path, settings: dict[str, Any], *, load: str, stuck: int) -> Loop:
    """Run a learner and its worker, and kill both once the engine no longer answers.

    stuck: samples outstanding at that point. Groups finished before version 5 may be among them, buffered in the
    learner.
    """
    incarnation = Loop(await bus_factory(), folder, steps=100, **settings)
    engine = Stuck()
    learner = asyncio.create_task(incarnation.run_learner())
    rollout = asyncio.create_task(
        run_worker(worker(await bus_factory(), engine, load=load, max_staleness=settings["max_staleness"]))
    )
    await until(lambda: engine.running > 0 and engine.running + 2 * len(incarnation.table.buffered) == stuck)
    for task in (learner, rollout):
        task.cancel()
    await asyncio.wait((learner, rollout))
    return incarnation


@pytest.mark.parametrize(
    ("mode", "max_staleness", "batches"),
    [("async", 1, 2), ("async", 0, 1), ("sync", 0, 1), ("one_step_off", 1, 1)],
)
async def test_a_learner_that_fell_far_back_does_not_wait_for_prompts_that_wait_for_it(
    bus_factory: Any, tmp_path: Path, mode: str, max_staleness: int, batches: int
) -> None:
    """The outstanding prompts ask for versions from 5 on, but the next incarnation begins at 0.

    Most of the log is too old from version max_staleness + 1 on, so the incarnation needs those prompts to reach
    version 5.
    """
    settings: dict[str, Any] = {"mode": mode, "max_staleness": max_staleness}
    load = "in_flight" if mode == "async" else "on_demand"
    await killed_life(bus_factory, tmp_path, settings, load=load, stuck=2 * 2 * batches)
    second = Loop(await bus_factory(), tmp_path, steps=8, **settings)
    async with asyncio.TaskGroup() as group:
        learner = group.create_task(second.run_learner(resume=True))
        async with second.bus.watch(WEIGHTS) as versions:  # its worker never gets the lost weights
            while (await anext(versions)).incarnation == 0:
                pass
        group.create_task(run_worker(worker(await bus_factory(), Engine(), load=load, max_staleness=max_staleness)))
        await learner
    assert second.learner.table.incarnation == 1
    assert second.backend.steps == 8
    assert max(row["staleness/max"] for row in second.recorder.rows) <= max_staleness
