"""Which groups moved against the others, and the search for the smallest set that did."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from asyncrl.audit.explain import SUSPECT, Observed, bisect, change_point, is_quiet, predicate_of, scan

SINCE = 30


def run_of(*, seed: int, workers: int = 8, poison: Any = lambda fields, step, answers: answers) -> list[Observed]:
    """Forty steps of 16 groups of 8 answers to easy and hard tasks; the policy learns all the time."""
    draw = np.random.default_rng(seed)
    made = []
    for step in range(1, 41):
        for place in range(16):
            number = step * 16 + place
            fields = {"worker": f"w{number % workers}", "task": "hard" if place % 3 else "easy"}
            fields["engine"] = "new" if fields["worker"] in ("w1", "w2") and step >= SINCE else "old"
            chance = min(0.95, (0.2 if fields["task"] == "hard" else 0.5) + step / 100 + draw.normal(0, 0.05))
            answers = (draw.random(8) < chance).astype(float)
            answers = poison(fields, step, answers) if step >= SINCE else answers
            made.append(
                Observed(
                    group=number, step=step, fields=fields, value=float(answers.mean()), answers=tuple(answers.tolist())
                )
            )
    return made


def inflated(fields: dict[str, str], step: int, answers: Any) -> Any:
    return answers * 1.1 if fields["worker"] == "w5" else answers


def corrupt(fields: dict[str, str], step: int, answers: Any) -> Any:
    return answers * 0 if fields["task"] == "easy" else answers


def bad_build(fields: dict[str, str], step: int, answers: Any) -> Any:
    return answers * 0 if fields["engine"] == "new" else answers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("poison", "field", "value"), [(inflated, "worker", "w5"), (corrupt, "task", "easy"), (bad_build, "engine", "new")]
)
async def test_a_planted_poison_is_the_strongest_suspect_and_is_found_in_few_tests(
    poison: Any, field: str, value: str, seed: int
) -> None:
    observed = run_of(seed=seed, poison=poison)
    found = scan(observed, since=SINCE)
    assert found[0].strength > SUSPECT
    ordered = [one.value for one in found if one.field == field]
    tests: list[Collection[str]] = []

    async def is_gone_without(values: Collection[str]) -> bool:
        tests.append(values)
        return is_quiet([one for one in observed if one.fields[field] not in values], since=SINCE, field=field)

    assert await bisect(ordered, is_gone_without) == [value]
    assert len(tests) <= 2 * math.log2(len(ordered))


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_suspect_where_all_learn_alike(seed: int) -> None:
    assert scan(run_of(seed=seed), since=SINCE)[0].strength < SUSPECT


@pytest.mark.parametrize("count", [2, 3, 5, 8, 100])
@pytest.mark.parametrize("guilty", [0, 1, -1])
async def test_a_search_takes_at_most_two_tests_for_each_halving(count: int, guilty: int) -> None:
    values = [str(number) for number in range(count)]
    tests = 0

    async def is_gone_without(chosen: Collection[str]) -> bool:
        nonlocal tests
        tests += 1
        return values[guilty] in chosen

    assert await bisect(values, is_gone_without) == [values[guilty]]
    assert tests <= 2 * math.ceil(math.log2(count))


async def test_two_guilty_ones_are_named_together_and_nothing_if_half_of_all_is_not_enough() -> None:
    async def is_both(left_out: Collection[str]) -> bool:
        return {"a", "b"} <= {*left_out}

    async def never(left_out: Collection[str]) -> bool:
        return False

    assert await bisect([*"abcdefgh"], is_both) == ["a", "b"]
    assert await bisect([*"abcdefgh"], never) == []


def test_the_step_since_which_a_metric_is_another_is_found() -> None:
    draw = np.random.default_rng(0)
    values = {step: (0.8 if step < 30 else 0.5) + float(draw.normal(0, 0.02)) for step in range(1, 41)}
    assert change_point(values, step=40) == SINCE
    assert change_point(values, step=33) == SINCE
    exploded = dict(enumerate([1.7, 2.1, 2.3, 1.8, 1.7, 1.4, 110.0, 198.0, 179.0, 273.0], 1))
    assert change_point(exploded, step=10) == 7


def test_a_finding_is_said_as_what_regrade_retracts() -> None:
    assert predicate_of("worker", ["w5"], since=30) == 'worker == "w5" and step >= 30'
    assert predicate_of("prompt", ["3a", "4b"], since=2) == 'prompt in ("3a", "4b") and step >= 2'
    assert predicate_of("age", ["2-3"], since=2) == ""
