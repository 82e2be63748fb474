"""What an answer comes down to, for a majority: what its reward compares with the label."""

from __future__ import annotations

import pytest

from asyncrl.actors.rollout.evaluation import DatasetRewards
from asyncrl.config import RewardSection
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
def test_a_vote_is_what_the_reward_looks_at(kind: str, options: dict[str, object], completion: str, vote: str) -> None:
    rewards = DatasetRewards({"set": load_reward(RewardSection(kind=kind, options=options))})
    assert rewards.vote("set", completion) == vote
