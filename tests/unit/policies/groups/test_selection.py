"""Which buffered groups train next: oldest first or as the run file says, and never a group that is too old."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, HopelessError
from asyncrl.policies.groups.selection import ORDERS, Selection, own_order
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from tests.harness.groups import group, span, trajectory


def table(versions: dict[int, int], *, step: int = 0) -> GroupTable:
    """A table with groups that arrived in this order with tokens of these versions."""
    made = GroupTable(step=step)
    for group_id in range(max(versions, default=-1) + 1):
        made.publish(group_id, position=group_id)
    for sequence, (group_id, version) in enumerate(versions.items(), start=1):
        made.arrive(sequence, group(group_id, version=version), now=0.0)
    return made


def rule(order: str = "oldest_first", *, max_staleness: int = 4) -> Selection:
    return Selection(max_staleness=max_staleness, order=order)


def ids(groups: list[BufferedGroup] | None) -> list[int] | None:
    return None if groups is None else [one.group_id for one in groups]


def test_the_oldest_groups_are_taken_first_whatever_their_arrival() -> None:
    assert ids(rule().next_batch(table({3: 1, 2: 1, 1: 2, 0: 2}), count=3)) == [2, 3, 0]


def test_groups_are_taken_by_the_users_own_key_and_an_error_of_it_is_named() -> None:
    own = dataclasses.replace(
        rule("mine:key"), rank=lambda group, oldest_version: (group.group_id % 2, -oldest_version)
    )
    made = table({3: 1, 2: 1, 1: 2, 0: 2})
    assert ids(own.next_batch(made, count=3)) == [0, 2, 1]
    assert own.next_batch(made, count=5) is None
    fails = dataclasses.replace(own, rank=lambda group, oldest: 1 // (oldest - oldest))
    with pytest.raises(HopelessError, match="staleness.order: mine:key raised ZeroDivisionError"):
        fails.next_batch(made, count=3)
    with pytest.raises(ConfigError, match="staleness.order: 'oldest_frist' is unknown; did you mean 'oldest_first'"):
        own_order("oldest_frist")


def test_a_batch_is_whole() -> None:
    assert rule().next_batch(table({0: 1}), count=2) is None


def test_nothing_too_stale_is_trained() -> None:
    made = table({0: 1, 1: 2}, step=4)
    assert ids(rule(max_staleness=2).stale(made)) == [0]


def test_where_trajectories_are_too_old_alone_a_group_is_dropped_with_its_last_one() -> None:
    """The trajectories are of versions 1 and 3. With a bound of 2, they can be trained until versions 3 and 5."""
    made = table({0: 1}, step=4)
    old, young = trajectory(version=1), trajectory(version=3)
    both = dataclasses.replace(group(1), trajectories=(old, young))
    made.publish(1, position=1)
    made.arrive(2, both, now=0.0)
    alone = dataclasses.replace(rule(max_staleness=2), discard="trajectories")
    assert ids(rule(max_staleness=2).stale(made)) == [0, 1]
    assert ids(alone.stale(made)) == [0]
    made.step = 6
    assert ids(alone.stale(made)) == [0, 1]


def test_where_tokens_are_too_old_alone_a_group_is_dropped_with_its_last_one() -> None:
    """The tokens are of versions 1 and 3; the observation after them has no age."""
    made = table({0: 1}, step=4)
    mask = np.array([True, True, False])
    spans = (span(1), span(3, start=1), span(9, start=2))
    late = dataclasses.replace(trajectory(), response_mask=mask, version_spans=spans)
    made.publish(1, position=1)
    made.arrive(2, dataclasses.replace(group(1), trajectories=(trajectory(version=1), late)), now=0.0)
    tokens = dataclasses.replace(rule(max_staleness=2), discard="tokens")
    assert ids(rule(max_staleness=2).stale(made)) == [0, 1]
    assert ids(tokens.stale(made)) == [0]
    made.step = 6
    assert ids(tokens.stale(made)) == [0, 1]


def test_groups_are_taken_in_the_order_the_run_file_names() -> None:
    made = table({3: 1, 0: 2, 1: 3})
    assert ids(rule("oldest_first").next_batch(made, count=2)) == [3, 0]
    assert ids(rule("freshest_first").next_batch(made, count=2)) == [1, 0]
    assert ids(rule("in_order").next_batch(made, count=2)) == [0, 1]


def test_in_order_a_batch_waits_for_the_straggler_between() -> None:
    made = table({0: 1, 2: 1})
    assert rule("in_order").next_batch(made, count=2) is None
    made.arrive(3, group(1, error="failed"), now=0.0)
    assert ids(rule("in_order").next_batch(made, count=2)) == [0, 2]


@pytest.mark.parametrize("order", sorted(ORDERS))
@given(
    versions=st.permutations(range(8)).flatmap(
        lambda ids: st.fixed_dictionaries({group_id: st.integers(0, 6) for group_id in ids})
    ),
    step=st.integers(0, 9),
)
def test_what_is_foreseen_is_what_is_taken_when_nothing_arrives(
    order: str, versions: dict[int, int], step: int
) -> None:
    made, chosen = table(versions, step=step), None
    made.drop(rule(order).stale(made))
    if (chosen := rule(order).next_batch(made, count=2)) is not None:
        made.take(chosen)
    foreseen = ids(rule(order).foresee(made, count=2))
    if chosen is not None:
        made.trained(max_staleness=0)
    made.drop(rule(order).stale(made))
    assert foreseen == ids(rule(order).next_batch(made, count=2))


@given(st.dictionaries(st.integers(0, 12), st.integers(0, 9), max_size=12), st.integers(0, 12), st.integers(0, 6))
def test_what_is_left_after_the_stale_are_dropped_is_within_the_bound(
    versions: dict[int, int], step: int, bound: int
) -> None:
    made = table(versions, step=step)
    made.drop(rule(max_staleness=bound).stale(made))
    assert {one.group_id for one in made.buffered.values()} == {i for i, v in versions.items() if step - v <= bound}


async def later(group: object, version: int) -> int:
    return version


def of_group_alone(group: object) -> int:
    return 0


@pytest.mark.parametrize(("name", "words"), [("later", "it is async"), ("of_group_alone", "too many positional")])
def test_an_order_that_cannot_be_called_is_refused_before_the_run(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"staleness.order: .*{name}' must take \(group, version\).*{words}"):
        own_order(f"tests.unit.policies.groups.test_selection:{name}")
