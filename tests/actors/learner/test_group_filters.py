"""Group filters of the run file: an exception fails the group, and a filter that fails every group ends the run."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors.learner.group_filters import GroupFilters, sample_group
from asyncrl.config.run import AlgorithmSection
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError, FilterError, HopelessError
from asyncrl.launch.checks.run_file import check
from asyncrl.messages import PromptGroup, Trajectory, TrajectoryGroup
from asyncrl.messages.topics import EVENTS
from tests import ROOT
from tests.harness.buses import first
from tests.harness.fakes import Engine, Loop, run_all, run_worker, single_turn, worker

DEMO = ROOT / "examples" / "demo.toml"


def answers(group: TrajectoryGroup) -> Any:
    return len(group.trajectories)


async def awaited(group: TrajectoryGroup) -> bool:
    return True


KEEP: dict[str, Any] = {"filter_cap": 3, "filter_cap_action": "keep"}


def needs_a_judge(group: TrajectoryGroup) -> bool:
    return group.trajectories[0].reward_parts["judge"] > 0


def test_a_group_is_kept_that_every_filter_keeps() -> None:
    asked = []

    def says(answer: bool) -> Callable[[TrajectoryGroup], bool]:
        return lambda group: asked.append(answer) or answer

    assert GroupFilters({}, max_in_a_row=1).keep(sample_group())
    assert GroupFilters({"one": says(True), "two": says(True)}, max_in_a_row=1).keep(sample_group())
    assert not GroupFilters({"one": says(False), "two": says(True)}, max_in_a_row=2).keep(sample_group())
    assert asked == [True, True, False]


async def test_a_group_with_a_failed_sample_is_filtered_before_a_batch_can_take_it(
    bus_factory: Any, tmp_path: Path
) -> None:
    """The missing sample is announced on the bus, and the learner waits for a batch meanwhile."""

    async def one_fails(prompt: PromptGroup, generate: Any, *, index: int) -> Trajectory:
        if index == 0:
            raise ValueError("a tool failed")
        return await single_turn(prompt, generate, index=index)

    odd = {"odd": lambda group: group.group_id % 2 == 1}
    loop = Loop(await bus_factory(), tmp_path, steps=4, groups_per_batch=1, group_size=3, filters=odd)
    await run_all(loop, worker(await bus_factory(), Engine(), rollout=one_fails, min_group=2))
    answers = sum(len(micro.boundaries) - 1 for step in loop.backend.trained for micro in step)
    assert answers == 4 * 2
    assert loop.recorder.rows[-1]["staleness/filtered_groups"] >= 3


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (json.dumps, "json:dumps raised TypeError: Object of type TrajectoryGroup is not JSON serializable"),
        (answers, "raised TypeError: a filter must return True to keep a group or False, not 2"),
        (awaited, "raised TypeError: a filter must return True to keep a group or False, not <coroutine object.*"),
        (needs_a_judge, r"raised KeyError: 'judge' \(test_group_filters.py:\d+\)"),
        (lambda group: sys.exit(3), "raised SystemExit: 3"),
    ],
)
def test_a_filter_that_raises_is_named_with_what_it_raised(function: Any, problem: str) -> None:
    filters = GroupFilters({"json:dumps": function}, max_in_a_row=3, max_raised=3)
    for _ in range(2):
        with pytest.raises(FilterError, match=f"algorithm.filters: .*{problem}$"):
            filters.keep(sample_group())
    with pytest.raises(HopelessError, match=f"{problem}; a filter raised on each of the last 3 groups"):
        filters.keep(sample_group())


@pytest.mark.parametrize("does", [lambda: 1 / 0, lambda: sys.exit(3)], ids=["raises", "exits"])
async def test_a_group_that_a_filter_raises_on_fails_and_the_run_goes_on(
    bus: Any, bus_factory: Any, tmp_path: Path, does: Callable[[], Any]
) -> None:
    def keep(group: TrajectoryGroup) -> bool:
        return group.group_id >= 3 or bool(does())

    loop = Loop(bus, tmp_path)
    loop.filters = {"mine:keep": keep}
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    await loop.run_learner()
    await task
    assert loop.recorder.rows[-1]["staleness/failed_groups"] == 3
    events = [record.message for record in await first(bus, await bus.last_sequence(EVENTS), topic=EVENTS)]
    assert not [one for one in events if one.kind == "quarantined"]
    failed = [one.data for one in events if one.kind == "failed"]
    assert sorted(one["group_id"] for one in failed) == [0, 1, 2]
    assert all("algorithm.filters: mine:keep raised" in one["error"] for one in failed)


async def test_a_run_ends_that_would_sample_for_ever(bus: Any, bus_factory: Any, tmp_path: Path) -> None:
    loop = Loop(bus, tmp_path)
    loop.filters, loop.max_filtered_in_a_row = {"nothing": lambda group: False}, 8
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(HopelessError, match="the last 8 groups were all filtered, the newest by nothing"):
        await loop.run_learner()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
async def test_at_the_cap_a_step_is_filled_with_what_comes(
    bus: Any, bus_factory: Any, tmp_path: Path, mode: Any
) -> None:
    loop = Loop(bus, tmp_path, mode=mode, algorithm_section=AlgorithmSection(filters=("nothing",), **KEEP))
    loop.filters = {"nothing": lambda group: False}
    load = "in_flight" if mode == "async" else "on_demand"
    await run_all(loop, worker(await bus_factory(), Engine(), load=load))
    rows = loop.recorder.rows
    assert loop.trained_groups == 8
    assert rows[-1]["staleness/kept_at_cap"] >= 8
    # groups that arrive after the last step are also filtered
    assert 3 <= rows[-1]["staleness/filtered_groups"] <= 3 * 5


async def test_at_the_cap_a_run_ends_with_the_reason_if_it_is_to(bus: Any, bus_factory: Any, tmp_path: Path) -> None:
    loop = Loop(bus, tmp_path, algorithm_section=AlgorithmSection(filters=("nothing",), filter_cap=3))
    loop.filters = {"nothing": lambda group: False}
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine())))
    with pytest.raises(HopelessError, match=r"filter_cap: 3 groups were filtered since the last step.*by nothing"):
        await loop.run_learner()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


def checked(task: Path, name: str) -> None:
    paths = [f"model.path={task / 'model'}", f"data.path={task / 'prompts.jsonl'}"]
    check(config.load(DEMO, [*paths, f'algorithm.filters=["{name}"]']))


def test_check_asks_each_filter_about_a_group(task: Path, caplog: pytest.LogCaptureFixture) -> None:
    checked(task, "dynamic_sampling")
    for name, problem in (
        ("json:dumps", "json:dumps raised TypeError: Object of type TrajectoryGroup is not JSON"),
        (f"{__name__}:answers", "answers raised TypeError: a filter must return True to keep a group or False, not 2"),
    ):
        with pytest.raises(ConfigError, match=f"algorithm.filters: .*{problem}"):
            checked(task, name)
    assert not caplog.records
    checked(task, f"{__name__}:needs_a_judge")
    assert "needs_a_judge raised KeyError: 'judge' (test_group_filters.py:" in caplog.text
