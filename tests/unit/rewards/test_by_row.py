"""Each row may name its reward."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl import config
from asyncrl.errors import ConfigError, RewardError
from asyncrl.messages import replace
from asyncrl.rewards.load import load_rewards, needs_label, rewards_of_rows
from tests.harness.rollouts import sample_of


def politeness(sample: Any) -> float:
    return float("please" in sample.completion)


SECTION = config.RewardSection(kind="exact", rows={"style": "tests.unit.rewards.test_by_row:politeness"})


def named(sample: Any, name: str) -> Any:
    return replace(sample, reward=name)


async def test_a_group_is_judged_by_the_reward_that_its_row_names() -> None:
    reward = load_rewards(SECTION, are_by_row=True)
    sample = sample_of("7, please", label="7")
    values = [(await reward([named(sample, name)] * 2))[1].value for name in ("", "style", "exact")]
    assert values == [0.0, 1.0, 0.0]
    with pytest.raises(RewardError, match="'code' is none of this worker's: "):
        await reward([named(sample, "code")])
    await reward.close()


def test_a_row_may_name_what_is_listed_and_what_needs_no_options() -> None:
    sections = rewards_of_rows(SECTION)
    assert needs_label(sections["exact"]) and not needs_label(sections["style"])


@pytest.mark.parametrize(
    ("rows", "are_by_row", "problem"),
    [
        ({"style": "no_such_module:f"}, True, "cannot import 'no_such_module'"),
        ({"style": 3}, True, "'style' must name a reward"),
        ({"style": "exact"}, False, "no column says which; set data.reward_key"),
    ],
)
def test_bad_rewards_of_rows_are_one_line(rows: dict[str, Any], are_by_row: bool, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_rewards(config.RewardSection(kind="exact", rows=rows), are_by_row=are_by_row)
    assert "\n" not in str(caught.value)
