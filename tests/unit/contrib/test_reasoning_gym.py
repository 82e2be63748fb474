"""The reasoning-gym source and reward, tested with a fake package that has the same interface and imports nothing."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import Counter
from typing import Any

import pytest

from asyncrl import config
from asyncrl.contrib.reasoning_gym import Score, TaskOptions, Tasks
from asyncrl.data.sources import make_source
from asyncrl.errors import ConfigError
from asyncrl.rewards.load import load_reward
from asyncrl.rewards.port import Sample
from tests.harness.rollouts import sample_of


class Doubles:
    """Asks for twice a number; close answers get half of the reward."""

    def __init__(self, *, size: int, seed: int, step: int = 1) -> None:
        self.seed, self.step = seed, step

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.seed + index * self.step
        return {"question": f"2 x {number}?", "answer": str(2 * number), "metadata": {"pair": (1, 2)}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return {0: 1.0, 1: 0.5}.get(abs(int(answer) - int(entry["answer"])), 0.0)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dataset(name: str, **settings: Any) -> Doubles:
        if name not in ("doubles", "pairs"):
            raise ValueError(f"Dataset '{name}' not registered")
        return Doubles(**settings)

    module = types.ModuleType("reasoning_gym")
    module.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def answered(row: dict[str, Any], completion: str) -> Sample:
    return dataclasses.replace(sample_of(completion), metadata=row["metadata"])


async def test_row_is_scored_by_its_own_task() -> None:
    row = Tasks(TaskOptions(weights={"doubles": 1}, seed=5, instruction=" Go.")).at(3)
    assert row["prompt"] == "2 x 8? Go." and row["label"] == "16"
    said = ["<answer>1</answer> no, <answer> 16 </answer>", "<answer>17</answer>", "<answer>3</answer>", "16"]
    reward = load_reward(config.RewardSection(kind="reasoning_gym"))
    assert [one.value for one in await reward([answered(row, text) for text in said])] == [1.0, 0.5, 0.0, 0.0]
    assert Score().vote(said[0]) == "16"


def test_tasks_come_by_weight_and_a_position_always_has_the_same_row() -> None:
    mixed = TaskOptions(weights={"doubles": 3, "pairs": 1}, settings={"pairs": {"step": 10}}, seed=1)
    one, other = Tasks(mixed), Tasks(mixed)
    rows = [one.at(position) for position in range(400)]
    assert rows[7:9] == [other.at(7), other.at(8)]
    counts = Counter(row["metadata"]["gym_task"] for row in rows)
    assert 60 < counts["pairs"] < 140  # 100 expected, standard deviation 8.7
    pair = next(place for place, row in enumerate(rows) if row["metadata"]["gym_task"] == "pairs")
    assert rows[pair]["label"] == str(2 * (1 + 10 * pair))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "missing weights"),
        ({"weights": {}}, "name data sets of reasoning-gym"),
        ({"weights": {"doubles": 0}}, "doubles must be a number > 0"),
        ({"weights": {"dubles": 1}}, "'dubles': Dataset 'dubles' not registered"),
        ({"weights": {"doubles": 1}, "settings": {"doubles": {"stepp": 1}}}, "unexpected keyword argument 'stepp'"),
        ({"weights": {"doubles": 1}, "settings": {"pairs": {}}}, "settings: pairs must be one of weights"),
    ],
)
def test_mistake_is_refused_in_one_line(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_source(config.DataSection(source="asyncrl.contrib.reasoning_gym:Tasks", options=options))
    assert problem in str(raised.value) and "\n" not in str(raised.value)


async def test_a_row_of_another_source_fails_its_group() -> None:
    with pytest.raises(ValueError, match="not one of reasoning-gym's"):
        Score()(sample_of("<answer>1</answer>"))
