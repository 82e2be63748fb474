"""Rows that are too easy rest: they are skipped before sampling, and a resumed run remembers them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.actors.learner.prompt_link import Answered, PromptLink, Published
from asyncrl.actors.learner.prompt_source import PromptSource
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config.curriculum import CurriculumSection
from asyncrl.data.prompts import PromptRow
from asyncrl.messages import Progress, SamplingParams
from asyncrl.messages.topics import PROGRESS, PROMPTS
from asyncrl.policies.groups.pass_rates import PassRates
from asyncrl.policies.groups.saved import LearnerState, PromptState
from asyncrl.policies.staleness.admission import Admission
from asyncrl.rewards.port import Reward, Sample
from tests.harness.fakes import Engine, Judge, Loop, run_all, worker


class Asked:
    """Labels of the requested rows, by step. All samples of even rows are solved, half of the samples of odd rows."""

    def __init__(self) -> None:
        self.labels: list[int] = []

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        label = int(samples[0].label)
        self.labels.append(label)
        return [Reward(value=float(label % 2 == 0 or place == 0)) for place in range(len(samples))]

    @property
    def by_step(self) -> list[list[int]]:
        return [sorted(self.labels[first : first + 5]) for first in range(0, len(self.labels), 5)]


def synchronous(bus: Any, directory: Path, **changes: Any) -> Loop:
    """Each step requests five rows, after all five rows of the previous step are trained."""
    settings: dict[str, Any] = {"mode": "sync", "max_staleness": 0, "groups_per_batch": 5, "steps": 3}
    return Loop(bus, directory, curriculum=CurriculumSection(high=0.9), **(settings | changes))


async def test_a_row_that_is_always_solved_rests_for_a_pass_and_is_asked_again(
    bus_factory: Any, tmp_path: Path
) -> None:
    loop, asked = synchronous(await bus_factory(), tmp_path), Asked()
    await run_all(loop, worker(await bus_factory(), Engine(), load="on_demand", reward=Judge(asked)))
    # Step 2 has the second pass without rows 0, 2 and 4, and the start of the third pass. Step 3 has the rest of the
    # third pass, and the fourth pass without rows 0 and 2, which the third pass solved. For row 4, only the first
    # result is known when the fourth pass reaches it.
    assert asked.by_step == [[0, 1, 2, 3, 4], [0, 1, 1, 2, 3], [1, 3, 3, 4, 4]]
    row = loop.recorder.rows[-1]
    assert row["curriculum/rested"] == 5.0 and row["curriculum/rows"] == 5.0
    assert (row["curriculum/too_easy"], row["curriculum/too_hard"]) == (0.6, 0.0)


async def test_where_every_row_would_rest_each_is_asked(bus_factory: Any, tmp_path: Path) -> None:
    """There is no best row to choose then, and the run must continue."""
    loop = synchronous(await bus_factory(), tmp_path)
    solved = Judge(lambda samples: [Reward(value=1.0)] * len(samples))
    await run_all(loop, worker(await bus_factory(), Engine(), load="on_demand", reward=solved))
    assert loop.trained_groups == 15


async def test_a_resumed_run_knows_which_rows_rest(bus_factory: Any, tmp_path: Path) -> None:
    asked = Asked()
    first = synchronous(await bus_factory(), tmp_path, steps=1, checkpoint_every=1)
    await run_all(first, worker(await bus_factory(), Engine(), load="on_demand", reward=Judge(asked)))
    bus = MemoryBus(
        max_prompts=64, max_log_bytes=2**24, ack_seconds=30, max_message_bytes=2**20
    )  # a bus that no finished run has used
    second = synchronous(bus, tmp_path, steps=3, checkpoint_every=1)
    await run_all(second, worker(bus, Engine(), load="on_demand", reward=Judge(asked)), resume=True)
    assert asked.by_step == [[0, 1, 2, 3, 4], [0, 1, 1, 2, 3], [1, 3, 3, 4, 4]]
    assert second.recorder.rows[-1]["curriculum/rested"] == 5.0


class Rows:
    """Four rows, again and again."""

    def at(self, position: int) -> PromptRow:
        return PromptRow(
            epoch=position // 4,
            prompt=f"row {position % 4}",
            tokens=np.array([10 + position % 4], np.int32),
            key=(0, position % 4),
        )


async def published(bus: MemoryBus, state: LearnerState, *, count: int, solved: Sequence[int]) -> list[Published]:
    """Run a prompt source until it has reported ``count`` groups. The rows ``solved`` rest after the first four."""
    link, found = PromptLink(), list[Published]()
    source = PromptSource(
        *("prompts", bus),
        rows=Rows(),  # type: ignore[arg-type]
        admission=Admission(mode="async", groups_per_batch=4, max_staleness=1, total_groups=100),
        sampling=SamplingParams(max_new_tokens=4),
        group_size=2,
        state=state,
        link=link,
        are_sampled=False,
        pass_rates=PassRates(low=0.1, high=0.9, rest=2),
    )
    running = asyncio.create_task(source.run())
    await bus.put(PROGRESS, Progress(incarnation=state.incarnation, step=0, policy_version=0, batches_taken=0, bound=0))
    while len(found) < count:
        report = await link.reports.get()
        if isinstance(report, Published):
            found.append(report)
        if solved and len(found) == 4:
            for row in solved:
                link.answered.put_nowait(Answered(row=(0, row), epoch=0, rewards=[1.0, 1.0]))
            await bus.put(PROGRESS, Progress(incarnation=0, step=0, policy_version=0, batches_taken=0, bound=1))
    while len(await bus.keys(PROMPTS)) < 8:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    return found


async def test_groups_that_a_dead_learner_published_are_credited_to_no_row() -> None:
    """It knew other pass rates than the checkpoint, so which rows it asked for is not known."""
    bus = MemoryBus(max_prompts=64, max_log_bytes=2**24, ack_seconds=30, max_message_bytes=2**20)
    state = LearnerState.fresh()
    dead = await published(bus, state, count=8, solved=[0, 1])
    assert [report.row for report in dead] == [(0, row) for row in (0, 1, 2, 3, 2, 3, 2, 3)]
    outstanding = {group_id: group_id for group_id in range(4)}
    saved = dataclasses.replace(
        state,
        incarnation=1,
        forks={1: 0},
        prompts=PromptState(next_group_id=4, position=4, outstanding=outstanding),
    )
    next_ = await published(bus, saved, count=4, solved=[])
    assert [(report.group_id, report.row) for report in next_] == [(group_id, None) for group_id in (4, 5, 6, 7)]
