"""A run has a metric for each of few categories; what further names say is not lost."""

from __future__ import annotations

from asyncrl.policies.batching.categories import MOST, Categories


def test_categories_beyond_the_first_are_counted_together() -> None:
    categories = Categories()
    first = {f"reward/category/{n}": (n + 1) / 4096 for n in range(MOST + 2)}
    row = categories.join_rest({"reward/mean": 0.5, **first})
    assert len(row) == 1 + MOST + 1
    assert row["reward/category/other"] == (1 + 2) / 4096, "the two rarest"
    assert categories.has_joined
    later = categories.join_rest({"reward/category/0": 0.25, "reward/category/9": 0.5, "reward/mean": 1.0})
    assert later == {"reward/category/other": 0.25, "reward/category/9": 0.5, "reward/mean": 1.0}


def test_a_part_joins_its_own_categories_and_a_category_that_is_called_other_is_among_them() -> None:
    categories = Categories()
    categories.join_rest({f"reward/math.category/{n}": 0.01 for n in range(MOST)})
    row = {"reward/math.category/other": 0.25, "reward/math.category/new": 0.5, "reward/code.category/new": 0.125}
    assert categories.join_rest(row) == {"reward/math.category/other": 0.75, "reward/code.category/other": 0.125}
