"""Judge processes: the answers of a group share its time, and the groups do not take each other's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.config import RewardSection
from asyncrl.config.reward import RewardPart
from asyncrl.rewards.judge_pool import JudgePool
from asyncrl.rewards.load import load_reward
from tests.harness.rewards import sample

ENDLESS = "\\boxed{{9^{{9^{{9^{{{}}}}}}}}}"


@pytest.fixture
async def pool() -> AsyncIterator[JudgePool]:
    found = JudgePool("tests.unit.rewards.fake_judge", [], name="fake", processes=1)
    found.seconds = 1000.0
    yield found
    await found.close()


async def test_each_answer_gets_an_equal_share_of_the_time_that_is_left(
    pool: JudgePool, caplog: pytest.LogCaptureFixture
) -> None:
    shares = await pool.ask([300, "share", 5000, "share"])  # three that differ: 333 s, then half of what is left
    assert shares == [1.0, pytest.approx(500, rel=0.1), 0.0, shares[1]]
    assert "reward fake: 1 of 3 different answers were not judged within reward.timeout_seconds = 1000" in caplog.text


async def test_stuck_judge_fails_only_its_own_answer(pool: JudgePool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = pool._answer

    async def stuck_at_7(judge: Any, line: str, seconds: float) -> float | None:
        if line == "7":
            raise TimeoutError
        return await answer(judge, line, seconds)

    monkeypatch.setattr(pool, "_answer", stuck_at_7)
    assert await pool.ask([1, 7, 2]) == [1.0, 0.0, 1.0]


async def test_slow_answers_of_one_group_are_0_and_cost_other_groups_nothing() -> None:
    pytest.importorskip("math_verify")
    parts = {"right": RewardPart(kind="math", options={"timeout_seconds": 100})}
    reward = load_reward(RewardSection(kind="parts", timeout_seconds=2.0, parts=parts))
    slow = [sample(text, label="5") for text in (ENDLESS.format(8), "\\boxed{5}", ENDLESS.format(9))]
    groups = await asyncio.gather(reward(slow), reward([sample("5", label="5")]), reward([sample("5", label="5")]))
    assert [[one.value for one in group] for group in groups] == [[0.0, 1.0, 0.0], [1.0], [1.0]]
    await reward.close()
