"""Reward workers and the rollout workers that use them, on both buses: no group is lost or graded as zero by
mistake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from asyncrl.actors.grading import rewards_elsewhere
from asyncrl.actors.grading.reward_worker import RewardWorker
from asyncrl.actors.grading.rewards_elsewhere import RewardsElsewhere, asked
from asyncrl.bus.port import Bus
from asyncrl.errors import RewardError
from asyncrl.messages.grading import Grades
from asyncrl.messages.topics import GRADES, GRADING, PROGRESS, TRAJECTORIES
from asyncrl.rewards.port import Reward, Sample
from tests.harness import fakes
from tests.harness.buses import SHORT, first, progress, publish_prompts, taken, until_acked
from tests.harness.rewards import sample

Open = Callable[..., Any]


class Judge:
    """Records its requests; answers while ``gate`` is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False

    async def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        self.asked.append(samples[0].completion)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
        finally:
            self.now -= 1
        if "bad" in samples[0].completion:
            raise RewardError("reward judge: it is bad")
        return [Reward(value=float(len(one.completion)), parts={"half": 0.5}) for one in samples]

    async def close(self) -> None:
        self.closed = True


def samples(*completions: str) -> list[Sample]:
    made = [sample(completion, label="12", prompt="7+5=") for completion in completions]
    return [Sample(**{**{n: getattr(one, n) for n in one.__slots__}, "parts": (one.trajectory,)}) for one in made]


def elsewhere(bus: Bus, *, largest: float = 100.0) -> RewardsElsewhere:
    return RewardsElsewhere(bus, worker="w0", largest=largest)


@contextlib.asynccontextmanager
async def reward_worker(bus: Bus, judge: Judge, *, name: str = "r0", **changes: Any) -> AsyncIterator[RewardWorker]:
    """A reward worker that runs inside the block and is killed at its end."""
    worker = RewardWorker(name, bus, reward=judge, **({"at_once": 2, "max_attempts": 3, "keep_seconds": 0.1} | changes))
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await worker.stop()


async def test_a_group_is_graded_by_another_process(bus_factory: Open) -> None:
    bus, other, judge = await bus_factory(), await bus_factory(), Judge()
    async with reward_worker(other, judge):
        rewards = await elsewhere(bus)(samples("a", "abc"))
    assert [(one.value, one.parts) for one in rewards] == [(1.0, {"half": 0.5}), (3.0, {"half": 0.5})]
    assert judge.closed


async def test_what_is_asked_twice_is_graded_once_and_kept_for_who_takes_the_group_over(bus_factory: Open) -> None:
    bus, judge = await bus_factory(), Judge()
    async with reward_worker(bus, judge):
        first_worker = asyncio.create_task(elsewhere(bus)(samples("a")))
        second_worker = asyncio.create_task(RewardsElsewhere(bus, worker="w1", largest=9)(samples("a")))
        assert await first_worker == await second_worker
    async with asyncio.timeout(30):  # there is no reward worker
        assert await elsewhere(bus)(samples("a")) == await first_worker
    assert judge.asked == ["a"]


async def test_a_request_of_a_reward_worker_that_is_killed_goes_to_another(bus_factory: Open) -> None:
    bus, other = await bus_factory(ack_seconds=SHORT), await bus_factory(ack_seconds=SHORT)
    stuck, judge = Judge(), Judge()
    stuck.gate.clear()
    async with reward_worker(other, stuck):
        asking = asyncio.create_task(elsewhere(bus)(samples("a")))
        await fakes.until(lambda: stuck.now == 1)
        await asyncio.sleep(2 * SHORT)  # longer than ack_seconds of the bus
        assert await bus.depth(GRADING) == 1
    async with reward_worker(other, judge, name="r1"):
        assert [one.value for one in await asking] == [1.0]
        await until_acked(bus, GRADING)


async def test_a_reward_worker_takes_no_more_than_it_grades_at_once(bus_factory: Open) -> None:
    bus, other, slow, free = await bus_factory(), await bus_factory(), Judge(), Judge()
    slow.gate.clear()
    async with reward_worker(other, slow), asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(elsewhere(bus)(samples("a" * (number + 1))))
        await fakes.until(lambda: slow.now == 2)
        async with reward_worker(bus, free, name="r1"):
            await fakes.until(lambda: len(free.asked) == 3)
        slow.gate.set()
    assert slow.most == 2


async def test_a_reward_that_raises_fails_its_group_with_the_reason(bus_factory: Open) -> None:
    bus, judge = await bus_factory(), Judge()
    async with reward_worker(bus, judge):
        with pytest.raises(RewardError, match="it is bad"):
            await elsewhere(bus)(samples("bad"))


async def test_what_kills_reward_workers_is_alone_on_its_last_attempt_and_then_fails(bus_factory: Open) -> None:
    bus, judge = await bus_factory(), Judge()
    judge.gate.clear()
    killer = asyncio.create_task(elsewhere(bus)(samples("killer")))
    async with reward_worker(bus, judge, max_attempts=2):
        await fakes.until(lambda: judge.now == 1)
    async with reward_worker(bus, judge, max_attempts=2):
        await fakes.until(lambda: judge.now == 1)
        other = asyncio.create_task(elsewhere(bus)(samples("other")))
        while await bus.depth(GRADING) < 2:
            await asyncio.sleep(0.01)
        assert judge.now == 1  # the second group waits, although two fit
    judge.gate.set()
    async with reward_worker(bus, judge, max_attempts=2):
        with pytest.raises(RewardError, match="gave up after 2 attempts"):
            await killer
        assert [one.value for one in await other] == [5.0]
    assert judge.asked == ["killer", "killer", "other"]


@pytest.mark.parametrize(
    "lie, problem",
    [
        (Grades(rewards=(1e9,), parts=({},)), "reward is 1e.09, beyond reward.largest = 100"),
        (Grades(rewards=(1.0, 1.0), parts=({}, {})), "2 rewards for 1 samples"),
        (Grades(rewards=(1.0,), parts=({"mean": 1.0},)), "reward/mean is a metric of the learner"),
    ],
)
async def test_a_reward_worker_can_give_no_impossible_reward(bus: Bus, lie: Grades, problem: str) -> None:
    await bus.put(GRADES, lie, key=asked(samples("a"), worker="w1").key())
    with pytest.raises(RewardError, match=problem):
        await elsewhere(bus)(samples("a"))


async def test_a_group_that_nobody_grades_is_waited_for_aloud_and_not_lost(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rewards_elsewhere, "AGAIN_SECONDS", 0.05)
    asking = asyncio.create_task(elsewhere(bus)(samples("a")))
    with caplog.at_level(logging.WARNING):
        await fakes.until(lambda: "waited" in caplog.text)
    assert await bus.depth(GRADING) == 1
    async with reward_worker(bus, Judge()):
        assert [one.value for one in await asking] == [1.0]


async def test_a_reward_worker_that_drains_answers_what_it_has_and_takes_no_more(bus: Bus) -> None:
    judge = Judge()
    judge.gate.clear()
    asking = asyncio.create_task(elsewhere(bus)(samples("a")))
    worker = RewardWorker("r0", bus, reward=judge, at_once=2, max_attempts=3, keep_seconds=1.0)
    running = asyncio.create_task(worker.run())
    await fakes.until(lambda: judge.now == 1)
    worker.drain()
    late = asyncio.create_task(elsewhere(bus)(samples("late")))
    while await bus.depth(GRADING) < 2:
        await asyncio.sleep(0.01)
    judge.gate.set()
    await asyncio.gather(running, asking)
    assert judge.asked == ["a"] and not late.done()
    late.cancel()


async def test_a_reward_worker_ends_with_its_run(bus: Bus) -> None:
    judge = Judge()
    async with reward_worker(bus, judge) as worker:
        running = asyncio.create_task(worker.run())
        await bus.put(PROGRESS, progress(1))
        await bus.put(PROGRESS, type(progress(2))(incarnation=0, step=2, policy_version=2, finished=True))
        await running
    assert not worker.draining.is_set() and judge.asked == []  # no other signal ended it


async def test_a_rollout_worker_generates_on_while_groups_are_graded_elsewhere_up_to_a_bound(bus: Bus) -> None:
    """With slots for one group, three groups may be ungraded. Then no other begins until they have rewards."""
    judge, engine = Judge(), fakes.Engine()
    judge.gate.clear()
    await publish_prompts(bus, *range(6))
    actors = fakes.worker(bus, engine, reward=elsewhere(bus), max_running=2, max_ungraded=3)
    running = asyncio.create_task(fakes.run_worker(actors))
    while await bus.depth(GRADING) < 3:
        await asyncio.sleep(0.01)
    assert (engine.running, await bus.depth(TRAJECTORIES)) == (0, 0)
    async with reward_worker(bus, judge, at_once=8):
        await fakes.until(lambda: judge.now == 3)
        await asyncio.sleep(0.1)
        assert (judge.now, engine.running) == (3, 0)
        judge.gate.set()
        records = await first(bus, 6)
    assert sorted(record.message.group_id for record in records) == list(range(6))
    assert all(record.message.error == "" for record in records)
    actors[0].drain()
    await running


async def test_a_worker_that_drains_gives_back_what_nobody_grades(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.actors.rollout.drain_patience.SECONDS", 0.05)
    await publish_prompts(bus, 0)
    actors = fakes.worker(bus, fakes.Engine(), reward=elsewhere(bus))
    running = asyncio.create_task(fakes.run_worker(actors))
    while not await bus.depth(GRADING):
        await asyncio.sleep(0.01)
    actors[0].drain()
    await running
    async with taken(bus, 1) as (delivery,):
        assert delivery.key == "0"
    assert await bus.depth(TRAJECTORIES) == 0
