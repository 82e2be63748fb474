"""The actors' guarantees, on both buses: no group is lost or trained twice, and no actor waits forever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.rollout import training
from asyncrl.errors import BusFull, EngineDied, EngineError, HopelessError, RewardError, WeightsError
from asyncrl.messages import Progress
from asyncrl.messages.topics import ACTORS, EVENTS, PROGRESS, PROMPTS, TRAJECTORIES
from asyncrl.policies.health.waits import SPACE_IN_LOG
from asyncrl.rewards.port import Reward, Sample
from tests.harness import fakes
from tests.harness.fakes import Engine, Loop, run_all, run_worker, until, worker
from tests.harness.metric_names import is_known
from tests.harness.rows import Rows


async def test_the_loop_trains_every_step_and_everybody_ends(loop: Loop, bus_factory: Any) -> None:
    await run_all(loop, worker(await bus_factory(), Engine()), worker(await bus_factory(), Engine(), name="w1"))
    assert loop.backend.steps == 4
    assert loop.trained_groups == 8
    assert (await loop.bus.states(PROGRESS))[""].finished


async def test_no_group_is_generated_that_is_not_trained(loop: Loop, bus_factory: Any) -> None:
    await run_all(loop, worker(await bus_factory(), Engine()))
    dropped = int(loop.recorder.rows[-1]["staleness/dropped_groups"])
    assert await loop.bus.last_sequence(PROMPTS) == 8 + dropped
    assert await loop.bus.depth(PROMPTS) == 0


async def test_every_metric_is_in_the_schema(loop: Loop, bus_factory: Any) -> None:
    await run_all(loop, worker(await bus_factory(), Engine()))
    names = {name for row in loop.recorder.rows for name in row} - {"step"}
    assert {name for name in names if not is_known(name)} == set()
    assert {"staleness/histogram", "weights/w0/lag_versions", "rollout/idle_ratio", "bus/lag"} <= names


async def test_every_step_says_when_it_ended_and_where_its_time_went(loop: Loop, bus_factory: Any) -> None:
    loop.checkpoint_every = 2
    await run_all(loop, worker(await bus_factory(), Engine()))
    rows = loop.recorder.rows
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    for name in ("step_seconds", "wait_seconds", "prepare_seconds", "export_seconds"):
        assert all(row[f"learner/{name}"] >= 0 for row in rows), name
    # the time of the checkpoint before step 3
    assert ["learner/checkpoint_seconds" in row for row in rows] == [False, False, True, False]


async def test_the_window_bounds_what_is_outstanding(loop: Loop) -> None:
    """Without answers, the prompt source publishes (max_staleness + 1) x groups_per_batch groups and no more."""
    task = asyncio.create_task(loop.run_learner())
    loop.steps = 100
    await until_depth(loop, 6)
    loop.learner.drain()
    await task
    assert await loop.bus.depth(PROMPTS) == 6


async def until_depth(loop: Loop, depth: int) -> None:
    while await loop.bus.depth(PROMPTS) < depth:
        await asyncio.sleep(0.01)


async def test_a_fast_engine_gets_no_more_groups_than_keep_the_learner_fed(loop: Loop, bus_factory: Any) -> None:
    """Groups that would wait for the learner are not begun: tokens are as young as they can be."""
    loop.steps, loop.max_staleness, loop.staleness = 6, 4, {"admission": "needed"}
    await run_all(loop, worker(await bus_factory(), Engine()))
    assert loop.recorder.rows[0]["staleness/max"] == 0
    windows = [row["staleness/window"] for row in loop.recorder.rows if "staleness/window" in row]
    assert windows and all(4 <= size <= 10 for size in windows)


async def test_staleness_stays_within_the_bound(loop: Loop, bus_factory: Any) -> None:
    loop.steps = 12
    await run_all(loop, worker(await bus_factory(), Engine()), worker(await bus_factory(), Engine(), name="w1"))
    assert max(row["staleness/max"] for row in loop.recorder.rows) <= 2


async def test_sync_mode_trains_only_fresh_tokens(loop: Loop, bus_factory: Any) -> None:
    loop.mode, loop.max_staleness = "sync", 0
    await run_all(loop, worker(await bus_factory(), Engine(), load="on_demand"))
    assert [row["staleness/max"] for row in loop.recorder.rows] == [0.0] * 4
    assert all(row["staleness/dropped_groups"] == 0 for row in loop.recorder.rows)


async def test_one_step_off_trains_tokens_at_most_one_version_old(loop: Loop, bus_factory: Any) -> None:
    loop.mode, loop.max_staleness = "one_step_off", 1
    await run_all(loop, worker(await bus_factory(), Engine(), load="on_demand"))
    ages = [(row["staleness/mean"], row["staleness/max"]) for row in loop.recorder.rows]
    assert ages[0] == (0.0, 0.0)
    assert ages[1] == (1.0, 1.0)  # admitted when batch 1 was taken, before version 1 existed
    assert all(mean == highest <= 1 for mean, highest in ages)  # no load within a batch


async def test_actors_say_what_they_wait_for(loop: Loop) -> None:
    task = asyncio.create_task(loop.run_learner())
    await until_depth(loop, 6)
    beat = loop.learner.heartbeat()
    assert (beat.role, beat.waits_for) == ("learner", "trajectories")
    assert beat.waits[0].on == "rollout-worker"
    loop.learner.drain()
    await task
    assert "learner" not in await loop.bus.states(ACTORS)


async def test_a_worker_that_joins_a_finished_run_ends_at_once(bus: Any) -> None:
    await bus.put(PROGRESS, Progress(incarnation=0, step=3, policy_version=3, finished=True))
    engine = Engine()
    await run_worker(worker(bus, engine))
    assert engine.closed


async def test_a_filtered_group_is_counted_and_another_takes_its_place(loop: Loop, bus_factory: Any) -> None:
    """Every third group is filtered. The run trains as many groups as without a filter, and reports the filtered
    count."""
    loop.filters = {"two of three": lambda group: group.group_id % 3 != 0}
    await run_all(loop, worker(await bus_factory(), Engine()))
    row = loop.recorder.rows[-1]
    assert loop.trained_groups == loop.steps * 2
    assert row["staleness/filtered_groups"] >= loop.steps * 2 // 3
    assert row["staleness/dropped_groups"] == 0


# -- weights -----------------------------------------------------------------------------------------------------------


async def test_weights_are_loaded_while_generations_go_on(loop: Loop, bus_factory: Any) -> None:
    """One worker answers, and the answers of the other are held back; the other still loads new weights."""
    held = Engine()
    held.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), held, max_running=1)))
        group.create_task(run_worker(worker(await bus_factory(), Engine(), name="w1")))
        learner = group.create_task(loop.run_learner())
        await until(lambda: any(held.running_at_load))
        held.gate.set()
        await learner
    assert held.loads == sorted(held.loads)


async def test_a_version_that_cannot_be_read_is_skipped(loop: Loop, bus_factory: Any) -> None:
    engine = Engine()
    engine.unreadable = {1}
    loop.steps = 3
    await run_all(loop, worker(await bus_factory(), engine))
    assert 1 not in engine.loads
    assert loop.backend.steps == 3


async def test_weights_that_stay_unreadable_end_the_worker_with_the_reason(
    loop: Loop, bus_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.actors.rollout.weight_follower.RETRY_SECONDS", 0.01)
    engine = Engine()
    engine.unreadable = {1}
    loop.mode, loop.max_staleness = "sync", 0
    task = asyncio.create_task(loop.run_learner())
    with pytest.raises(WeightsError, match="version 1 is torn"):
        await run_worker(worker(await bus_factory(), engine, load="on_demand"))
    loop.learner.drain()
    await task


async def test_a_draining_load_waits_until_nothing_runs(loop: Loop, bus_factory: Any) -> None:
    engine = Engine()
    await run_all(loop, worker(await bus_factory(), engine, load="drain"))
    assert engine.loads
    assert set(engine.running_at_load) == {0}


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_waits_for_room_in_the_log_says_since_when(
    loop: Loop, bus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait's start must not reset with each attempt, because only a growing wait is reported as a stall."""
    monkeypatch.setattr(training, "FULL_LOG_SECONDS", 0.001)
    rollout, follower = worker(bus, Engine())
    publish, said = bus.publish, []

    async def full(topic: Any, message: Any, *, key: str = "", again: bool = False) -> None:
        if topic is TRAJECTORIES and len(said) < 5:
            said.append([wait.since for wait in rollout.waits._open if wait.what == SPACE_IN_LOG])
            raise BusFull("trajectories: full")
        await publish(topic, message, key=key)

    monkeypatch.setattr(bus, "publish", full)
    await run_all(loop, (rollout, follower))
    assert said[-1]
    assert min(said[-1]) == min(said[1])


async def test_a_failed_request_is_tried_again(loop: Loop, bus_factory: Any) -> None:
    engine = Engine()
    engine.failures = 1
    await run_all(loop, worker(await bus_factory(), engine))
    assert loop.trained_groups == 8


async def test_a_dead_engine_ends_the_worker_and_loses_nothing(loop: Loop, bus_factory: Any) -> None:
    dead = Engine()
    dead.dies = True
    async with asyncio.TaskGroup() as group:
        learner = group.create_task(loop.run_learner())
        with pytest.raises(EngineDied):
            await run_worker(worker(await bus_factory(), dead))
        assert dead.closed
        group.create_task(run_worker(worker(await bus_factory(), Engine(), name="w1")))
        await learner
    assert loop.trained_groups == 8


async def test_a_worker_that_vanishes_loses_nothing(bus_factory: Any, tmp_path: Path) -> None:
    """The worker is cancelled while it holds groups, as by SIGKILL. The bus redelivers them to the next worker."""
    loop = Loop(await bus_factory(), tmp_path)
    held = Engine()
    held.gate.clear()
    async with asyncio.TaskGroup() as group:
        learner = group.create_task(loop.run_learner())
        victim = asyncio.create_task(run_worker(worker(await bus_factory(), held)))
        await until(lambda: held.running > 0)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        group.create_task(run_worker(worker(await bus_factory(), Engine(), name="w1")))
        await learner
    assert loop.trained_groups == 8


async def test_a_draining_worker_finishes_what_it_holds(loop: Loop, bus_factory: Any) -> None:
    engine = Engine()
    engine.gate.clear()
    leaving = worker(await bus_factory(), engine, max_running=4)
    async with asyncio.TaskGroup() as group:
        learner = group.create_task(loop.run_learner())
        left = group.create_task(run_worker(leaving))
        await until(lambda: engine.running == 4)
        leaving[0].drain()
        engine.gate.set()
        await left
        assert await loop.bus.last_sequence(TRAJECTORIES) == 2
        group.create_task(run_worker(worker(await bus_factory(), Engine(), name="w1")))
        await learner
    assert loop.trained_groups == 8


async def test_a_reward_that_fails_buries_the_group_and_the_run_goes_on(loop: Loop, bus_factory: Any) -> None:
    def picky(samples: Sequence[Sample]) -> Sequence[Reward]:
        if samples[0].label == 0:
            raise RewardError("reward raised ValueError: cannot judge p0")
        return fakes.token_sum(samples)

    await run_all(loop, worker(await bus_factory(), Engine(), reward=fakes.Judge(picky)))
    assert loop.trained_groups == 8
    assert loop.recorder.rows[-1]["staleness/failed_groups"] > 0
    assert any(key.startswith("learner/0-failed") for key in await loop.bus.keys(EVENTS))


async def test_a_rollout_function_that_raises_is_data(
    loop: Loop, bus_factory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its traceback is logged once, however often it raises."""
    caplog.set_level("INFO")

    async def picky(prompt: Any, generate: Any, *, index: int) -> Any:
        if prompt.label == 1:
            raise KeyError("a bug in the user's tool")
        return await fakes.single_turn(prompt, generate, index=index)

    await run_all(loop, worker(await bus_factory(), Engine(), rollout=picky))
    assert loop.trained_groups == 8
    (explained,) = [record for record in caplog.records if record.message == "where it was raised:"]
    assert explained.levelname == "INFO"  # only for the log file
    assert isinstance(explained.exc_info[1], KeyError)


async def test_a_run_whose_groups_all_fail_ends_with_the_reason(loop: Loop, bus_factory: Any) -> None:
    def broken(samples: Sequence[Sample]) -> Sequence[Reward]:
        raise RewardError("judge is not reachable")

    loop.max_failed_in_a_row = 8
    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine(), reward=fakes.Judge(broken))))
    with pytest.raises(HopelessError, match="last 8 groups were all failed.*judge is not reachable"):
        await loop.run_learner()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_program_that_fails_alike_from_the_start_ends_the_run_soon(loop: Loop, bus_factory: Any) -> None:
    async def broken(prompt: Any, generate: Any, *, index: int) -> Any:
        raise KeyError(f"no tool in task {prompt.label}")

    task = asyncio.create_task(run_worker(worker(await bus_factory(), Engine(), rollout=broken)))
    with pytest.raises(HopelessError, match="last 8 groups were all failed.*no tool in task"):
        await loop.run_learner()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("fails", ["first 10 for several reasons", "10 after the first"])
async def test_failures_that_differ_or_come_later_do_not_end_the_run_soon(
    loop: Loop, bus_factory: Any, fails: str
) -> None:
    async def unlucky(prompt: Any, generate: Any, *, index: int) -> Any:
        late = fails == "10 after the first"
        if late < prompt.group_id + 1 <= late + 10:
            raise KeyError("no tool" if late or prompt.group_id % 2 else "no task")
        return await fakes.single_turn(prompt, generate, index=index)

    await run_all(loop, worker(await bus_factory(), Engine(), rollout=unlucky, max_running=1))
    assert loop.trained_groups == 8


async def test_a_group_that_fails_every_attempt_is_failed_with_the_last_reason(
    loop: Loop, bus_factory: Any, caplog: Any
) -> None:
    async def unlucky(prompt: Any, generate: Any, *, index: int) -> Any:
        if prompt.label == 0:
            raise EngineError("out of memory")
        return await fakes.single_turn(prompt, generate, index=index)

    await run_all(loop, worker(await bus_factory(), Engine(), rollout=unlucky, max_attempts=2))
    assert loop.trained_groups == 8
    assert "group 0: attempt 1 failed: out of memory" in caplog.text
    assert "group 0 failed on w0: gave up after 2 attempts, the last: out of memory" in caplog.text


async def test_over_long_prompts_are_dropped_and_counted(loop: Loop, bus_factory: Any) -> None:
    loop.rows = Rows(overlong=frozenset({0, 3}))
    await run_all(loop, worker(await bus_factory(), Engine()))
    assert loop.recorder.rows[-1]["data/overlong_prompts"] == 2
    assert loop.trained_groups == 8


async def test_data_that_ends_ends_the_run_with_what_is_left_over(loop: Loop, bus_factory: Any, caplog: Any) -> None:
    loop.rows = Rows(count=5, epochs=1)
    await run_all(loop, worker(await bus_factory(), Engine()))
    assert loop.backend.steps == 2
    assert "the data has ended after 2 steps; 1 groups are left over" in caplog.text


async def test_waiting_for_stragglers_drops_nothing(loop: Loop, bus_factory: Any) -> None:
    """One worker is slow. With eviction "wait", its group is trained, not dropped."""
    loop.wait_for_stragglers, loop.steps = True, 6
    slow = Engine()
    slow.gate.clear()
    async with asyncio.TaskGroup() as group:
        learner = group.create_task(loop.run_learner())
        group.create_task(run_worker(worker(await bus_factory(), slow, max_running=1)))
        await until(lambda: slow.running > 0)
        group.create_task(run_worker(worker(await bus_factory(), Engine(), name="w1")))
        await until(lambda: loop.backend.steps >= 2)
        slow.gate.set()
        await learner
    assert loop.recorder.rows[-1]["staleness/dropped_groups"] == 0
    assert loop.trained_groups == 12
