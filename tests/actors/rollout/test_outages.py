"""A service that groups need is away: they wait, nothing fails, and what was sampled is kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.actors.rollout import outages
from asyncrl.environments.builtin import single_turn
from asyncrl.errors import MaybeOutage, Outage, RewardError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from asyncrl.policies.health.waits import SERVICE
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.port import Reward, Sample
from tests.harness import fakes
from tests.harness.buses import first
from tests.harness.fakes import Engine, Loop, run_all, worker
from tests.harness.partial_rollouts import publish_prompt


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "PAUSES", (0.0,) * 5)


class Server:
    """A judge that is up or not. ``refuses``: groups that it alone refuses."""

    def __init__(self, *, refuses: int | None = None) -> None:
        self.is_up = True
        self.refuses = refuses
        self.num_refused = 0

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Reward]:
        if not self.is_up or samples[0].label == self.refuses:
            self.num_refused += 1
            raise Outage("reward remote: http://judge: ConnectionRefusedError")
        return fakes.token_sum(samples)


def is_waiting(actor: Any) -> bool:
    return any(wait.on == SERVICE and "http://judge" in wait.what for wait in actor.heartbeat().waits)


async def test_a_run_waits_for_a_judge_that_is_away_says_so_and_fails_nothing(loop: Loop, bus_factory: Any) -> None:
    server, engine = Server(), Engine()
    server.is_up = False
    actors = worker(await bus_factory(), engine, reward=fakes.Judge(server))
    running = asyncio.create_task(run_all(loop, actors))
    sampled = 2 * loop.run.window
    await fakes.until(lambda: server.num_refused > 100 and len(engine.prompts) == sampled and is_waiting(actors[0]))
    server.num_refused = 0
    await fakes.until(lambda: server.num_refused > 100)  # far more than failures in a row may be
    assert len(engine.prompts) == sampled  # each answer of the window once, however often they were to be judged
    server.is_up = True
    await running
    assert loop.backend.steps == 4
    assert loop.table.counts["failed"] == 0


async def test_a_group_that_only_its_own_judgement_fails_does_not_hold_up_the_run(loop: Loop, bus_factory: Any) -> None:
    await run_all(loop, worker(await bus_factory(), Engine(), reward=fakes.Judge(Server(refuses=0))))
    assert loop.trained_groups == 8
    assert loop.table.counts["failed"] > 0


async def test_a_rollout_function_whose_service_was_away_runs_again_on_the_same_answers(
    loop: Loop, bus_factory: Any, tmp_path: Any
) -> None:
    """Its answers are not sampled again, and it is tried until it gets through."""
    failures = 20

    async def searches(prompt: Any, generate: Any, *, index: int) -> Any:
        nonlocal failures
        made = await single_turn(prompt, generate, index=index)
        if failures:
            failures -= 1
            raise ConnectionResetError("the search engine is away")
        return made

    engine = Engine()
    await run_all(loop, worker(await bus_factory(), engine, rollout=searches))
    assert failures == 0
    assert loop.table.counts["failed"] == 0
    assert len(engine.prompts) == 2 * loop.table.next_group_id


async def test_an_answer_that_an_outage_left_behind_ends_unseen(loop: Loop, bus_factory: Any) -> None:
    """The function gives up while one of its calls goes on. It runs again, and its calls are those that count."""
    left_behind: list[asyncio.Task[Any]] = []

    async def searches(prompt: Any, generate: Any, *, index: int) -> Any:
        calling = asyncio.ensure_future(single_turn(prompt, generate, index=index))
        if len(left_behind) < 8:
            left_behind.append(calling)
            await asyncio.sleep(0)
            raise ConnectionResetError("the search engine is away")
        return await calling

    await run_all(loop, worker(await bus_factory(), Engine(), rollout=searches))
    assert loop.table.counts["failed"] == 0
    assert len(await asyncio.gather(*left_behind)) == 8


async def test_a_worker_that_drains_in_an_outage_gives_its_groups_back(bus_factory: Any) -> None:
    bus, server = await bus_factory(), Server()
    server.is_up = False
    await publish_prompt(bus, 0)
    actors = worker(await bus_factory(), Engine(), reward=fakes.Judge(server))
    running = asyncio.create_task(fakes.run_worker(actors))
    await fakes.until(lambda: is_waiting(actors[0]))
    actors[0].drain()
    await running
    assert (await bus.depth(PROMPTS), await bus.depth(TRAJECTORIES)) == (1, 0)


async def make_group(bus: Any, reward: Any, *, size: int = 4, min_group: int = 0) -> TrajectoryGroup:
    """Return the only group that a worker makes."""
    await publish_prompt(bus, 0, group_size=size)
    actors = worker(bus, Engine(), reward=reward, min_group=min_group)
    running = asyncio.create_task(fakes.run_worker(actors))
    (record,) = await first(bus, 1)
    actors[0].drain()
    await running
    assert isinstance(record.message, TrajectoryGroup)
    return record.message


def some(samples: Sequence[Sample]) -> list[Reward | RewardError]:
    """No reward for the second answer."""
    return [RewardError("no number in it") if at == 1 else Reward(value=1.0 + at) for at in range(len(samples))]


async def test_an_answer_without_a_reward_is_left_out_and_its_group_goes_on(bus: Any) -> None:
    group = await make_group(bus, fakes.Judge(some), min_group=2)
    assert group.rewards == [1.0, 3.0, 4.0]
    assert [parts[0].rollout for parts in group.rollouts] == [0, 2, 3]
    assert (group.cancelled, group.failed_samples) == (1, 1)


async def test_without_min_group_an_answer_without_a_reward_fails_its_group(bus: Any) -> None:
    group = await make_group(bus, fakes.Judge(some))
    assert group.error == "no number in it"


@pytest.mark.parametrize(("kind", "tries"), [(MaybeOutage, 1 + outages.MAYBE_TRIES), (Outage, 1 + outages.ALONE_TRIES)])
async def test_an_answer_that_alone_cannot_be_judged_is_left_out_and_soon_so_if_it_may_be_its_fault(
    bus: Any, kind: type[Outage], tries: int
) -> None:
    """Its siblings are judged each time."""
    asked = 0

    def one_fails(samples: Sequence[Sample]) -> list[Reward | RewardError]:
        nonlocal asked
        asked += 1
        return [kind("HTTP 500") if at == 1 else Reward(value=1.0) for at in range(len(samples))]

    group = await make_group(bus, fakes.Judge(one_fails), min_group=2)
    assert group.rewards == [1.0] * 3
    assert asked == tries


async def test_an_outage_lasts_although_some_answers_need_no_judge(
    loop: Loop, bus_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule decides about the first answer of each group, and a judge that is away about the others."""
    monkeypatch.setattr(outages, "ALONE_TRIES", outages.MOST_TRIES)  # without pauses, the first one is soon tried often
    monkeypatch.setattr(outages, "MOST_TRIES", 10**6)
    refused = 0

    def rule_or_judge(samples: Sequence[Sample]) -> list[Reward | RewardError]:
        nonlocal refused
        refused += 1
        is_away = refused < 50
        return [Outage("away") if at and is_away else Reward(value=1.0 + at) for at in range(len(samples))]

    await run_all(loop, worker(await bus_factory(), Engine(), reward=fakes.Judge(rule_or_judge)))
    assert refused > 50
    assert loop.table.counts["failed"] == 0


async def test_an_outage_between_two_answers_of_a_group_is_one_and_costs_none_of_them(bus: Any) -> None:
    tries = 0

    def breaks_off(samples: Sequence[Sample]) -> list[Reward | RewardError]:
        nonlocal tries
        tries += 1
        if tries == 2:
            raise Outage("away")
        return [Outage("away") if tries == 1 and at == 1 else Reward(value=1.0) for at in range(len(samples))]

    group = await make_group(bus, fakes.Judge(breaks_off), min_group=2)
    assert group.rewards == [1.0] * 4


async def test_a_service_that_refuses_half_of_the_requests_costs_no_answer(bus: Any) -> None:
    """Only what was refused is asked again, and as long as each try gets some through, it is no answer's fault."""
    asked: Counter[int] = Counter()

    async def every_second(sample: Sample) -> float:
        asked[sample.trajectory.rollout] += 1
        if asked[sample.trajectory.rollout] <= sample.trajectory.rollout // 2:  # two fewer each time
            raise InternalServerError
        return 1.0

    class InternalServerError(Exception):
        status_code = 500

    reward = GuardedReward(every_second, name="mine", takes_group=False, timeout_seconds=600.0)
    group = await make_group(bus, reward, size=8)
    assert group.rewards == [1.0] * 8
    assert asked == {at: at // 2 + 1 for at in range(8)}


async def test_groups_that_began_before_a_long_outage_wait_for_its_end(
    loop: Loop, bus_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others got through while they were sampled, but nobody does while they wait."""
    monkeypatch.setattr(outages, "MOST_TRIES", 5)
    monkeypatch.setattr(outages, "ALONE_TRIES", 10**6)
    calls = 0

    def away_for_long(samples: Sequence[Sample]) -> list[Reward]:
        nonlocal calls
        calls += 1
        if 4 < calls < 200:
            raise Outage("away")
        return [Reward(value=1.0 + at) for at in range(len(samples))]

    await run_all(loop, worker(await bus_factory(), Engine(), reward=fakes.Judge(away_for_long)))
    assert calls >= 200 and loop.table.counts["failed"] == 0
