"""Rewards of several parts, and rewards that rows name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.config import run_file
from asyncrl.config.reward import RewardSection
from asyncrl.config.tables import build
from asyncrl.errors import ConfigError, RewardError
from asyncrl.messages import replace
from asyncrl.rewards.load import load_reward, load_rewards, needs_label, rewards_of_rows
from asyncrl.rewards.port import Reward, Sample
from tests.harness.rewards import rewards
from tests.harness.rollouts import sample_of

HERE = "tests.unit.rewards.test_parts"
RIGHT = {"kind": "exact", "options": {"extract": r"\d+$"}}
FORMAT = {"kind": "regex", "weight": 0.25, "options": {"pattern": "^<think>.*</think>", "compare": "match"}}


def section(**parts: dict[str, Any]) -> RewardSection:
    return build(RewardSection, {"kind": "parts", "parts": parts}, "reward")


def graded(sample: Sample) -> Reward:
    return Reward(value=0.5, parts={"grade": 5.0})


def fails(sample: Sample) -> float:
    raise ValueError("no judge today")


def told(sample: Sample, reward: float, **parts: float) -> Sample:
    return replace(sample, trajectory=replace(sample.trajectory, reward=reward, reward_parts=parts))


async def test_a_reward_is_the_weighted_sum_of_its_parts_and_each_is_a_metric() -> None:
    reward = load_reward(section(right=RIGHT, format=FORMAT, watched={"kind": f"{HERE}:graded", "weight": 0.0}))
    answers = ["<think>2+5</think>7", "7", "<think>2+5</think>8", "8"]
    made = await rewards(reward, [sample_of(answer, label="7") for answer in answers])
    assert [one.value for one in made] == [1.25, 1.0, 0.25, 0.0]  # 1 for the right answer, 0.25 for the format
    assert made[0].parts == {"right": 1.0, "format": 1.0, "watched": 0.5, "watched.grade": 5.0}
    await reward.close()


async def test_what_a_harness_earned_can_be_one_of_the_parts() -> None:
    """The harness's own metrics keep their names, with this reward as with every other."""
    sample = told(sample_of("<think>2+5</think>7", label="7"), 0.5, turns=3.0)
    reward = load_reward(section(right=RIGHT, played={"kind": "none", "weight": 2.0}))
    (made,) = await rewards(reward, [sample])
    assert (made.value, made.parts) == (2.0, {"right": 1.0, "played": 0.5, "turns": 3.0})
    exact = load_reward(build(RewardSection, {"kind": "exact", "options": RIGHT["options"]}, "reward"))
    (alone,) = await rewards(exact, [sample])
    assert (alone.value, alone.parts) == (1.0, {"turns": 3.0})


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"turns": math.inf}, "turns is inf"),
        ({"mean": 1.0}, "reward/mean is a metric of the learner"),
        ({f"p{n}": 0.0 for n in range(64)}, "has 65 parts, and 64 are allowed"),
    ],
    ids=["inf", "name", "many"],
)
async def test_what_a_harness_tells_is_checked_where_it_was_made(parts: dict[str, float], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        await load_reward(RewardSection(kind=f"{HERE}:graded"))([told(sample_of(), 0.0, **parts)])


async def test_a_part_that_fails_fails_the_group_with_its_own_reason() -> None:
    reward = load_reward(section(right=RIGHT, judged={"kind": f"{HERE}:fails", "weight": 0.0}))
    with pytest.raises(RewardError, match=f"^reward {HERE}:fails: raised ValueError: no judge today "):
        await reward([sample_of("7", label="7")])


async def test_parts_are_the_reward_of_rows_without_one_of_their_own() -> None:
    parts = build(RewardSection, {"kind": "parts", "parts": {"right": RIGHT}, "rows": {"all": "parts"}}, "reward")
    reward = load_rewards(parts, are_by_row=True)
    for name, value in (("", 1.0), ("all", 1.0), ("exact", 0.0)):
        (made,) = await rewards(reward, [replace(sample_of("it is 7", label="7"), reward=name)])
        assert made.value == value
    await reward.close()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"kind": "parts"}, r'reward.kind: "parts" needs parts, such as \[reward.parts.right\]'),
        ({"kind": "exact", "parts": {"a": RIGHT}}, 'reward.parts: reward.kind is "exact", and they would not count'),
        ({"kind": "parts", "parts": {"a": {}}}, "reward.parts: a: missing kind"),
        ({"kind": "parts", "parts": {"a": RIGHT | {"wieght": 1}}}, "unknown key 'wieght'; did you mean 'weight'?"),
        ({"kind": "parts", "parts": {"a": RIGHT | {"weight": "1"}}}, "reward: parts: a: weight must be a number"),
        ({"kind": "parts", "parts": {"a": 1}}, "reward: parts: a must be a table, got 1"),
        ({"kind": "parts", "parts": {"a": {"kind": "parts"}}}, "parts: a: a part has no parts of its own"),
        ({"kind": "parts", "parts": {"a": {"kind": "exactly"}}}, "reward.parts: a: .*did you mean 'exact'"),
        ({"kind": "parts", "parts": {"std": RIGHT}}, "reward.parts: .*reward/std is a metric of the learner"),
        ({"kind": "parts", "parts": {"a": {"kind": "regex"}}}, "reward.parts: a: .*missing pattern"),
        ({"kind": "parts", "options": {"x": 1}, "parts": {"a": RIGHT}}, "reward.options: a reward of parts has none"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused_in_one_line(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_reward(build(RewardSection, table, "reward"))
    assert "\n" not in str(caught.value)


def test_a_run_file_has_a_table_for_each_part(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\npath = "d"\n[reward]\nkind = "parts"\n'
        '[reward.parts.right]\nkind = "exact"\n[reward.parts.style]\nkind = "random"\nweight = 1\n'
    )
    made = run_file.load(path, ["reward.parts.style.weight=0.5"])
    assert made.reward.parts == {
        "right": config.RewardPart(kind="exact"),
        "style": config.RewardPart(kind="random", weight=0.5),
    }


def politeness(sample: Any) -> float:
    return float("please" in sample.completion)


SECTION = config.RewardSection(kind="exact", rows={"style": "tests.unit.rewards.test_parts:politeness"})


def named(sample: Any, name: str) -> Any:
    return replace(sample, reward=name)


async def test_a_group_is_judged_by_the_reward_that_its_row_names() -> None:
    reward = load_rewards(SECTION, are_by_row=True)
    sample = sample_of("7, please", label="7")
    values = [(await rewards(reward, [named(sample, name)] * 2))[1].value for name in ("", "style", "exact")]
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
