"""The vote of an answer in a majority: the value that its reward compares with the label."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.rollout.evaluation import DatasetRewards
from asyncrl.config import RewardSection
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.load import load_reward


@pytest.mark.parametrize(
    "kind, options, completion, vote",
    [
        ("exact", {}, "  Yes ", "Yes"),
        ("exact", {"ignore_case": True}, "Yes", "yes"),
        ("exact", {"extract": r"answer: (\w+)"}, "answer: 1, no, answer: 2", "2"),
        ("exact", {"extract": r"answer: (\w+)"}, "I do not know", ""),
        ("regex", {"pattern": r"<a>(.*?)</a>"}, "<a> 7 </a>", "7"),
        ("regex", {"pattern": r"<a>(.*?)</a>"}, "7", ""),
        ("math", {}, r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("math", {}, r"\boxed{1}, no: \boxed{ x = 3 }", "x=3"),
        ("math", {}, "1,234 apples and then 5,000.50", "5000.50"),
        ("math", {}, "none", ""),
        ("asyncrl.data.demo_task:reward", {}, " 0123 ", "0123"),
    ],
)
async def test_vote_is_the_text_that_the_reward_compares(
    kind: str, options: dict[str, object], completion: str, vote: str
) -> None:
    rewards = DatasetRewards({"set": load_reward(RewardSection(kind=kind, options=options))})
    assert await rewards.votes("set", [completion]) == [vote]


def with_vote(vote: Any, *, timeout_seconds: float = 120.0) -> DatasetRewards:
    function: Any = SimpleNamespace(vote=vote)
    guarded = GuardedReward(function, name="own", takes_group=False, timeout_seconds=timeout_seconds)
    return DatasetRewards({"set": guarded})


async def test_slow_vote_does_not_block_the_worker() -> None:
    loop = asyncio.get_running_loop()

    def vote(completion: str) -> str:
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        return completion if answered.wait(120) else "the event loop was blocked"

    assert await with_vote(vote).votes("set", ["a", "b"]) == ["a", "b"]


async def test_hanging_vote_times_out_with_the_reward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    rewards = with_vote(lambda completion: str(gate.wait()), timeout_seconds=0.01)
    assert await rewards.votes("set", ["a", "b"]) == ["", ""]
    gate.set()
    assert "set: its answers have no vote: vote() took longer than reward.timeout_seconds = 0.01" in caplog.text
