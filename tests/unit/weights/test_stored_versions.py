"""Chains of stored versions: what a worker needs, and what must be kept for it."""

from __future__ import annotations

import pytest

from asyncrl.errors import WeightsError
from asyncrl.weights.stored_versions import Description, Link, parse_description


def link(version: int, *, full: int = 0, delta: int = 1) -> Link:
    return Link(incarnation=0, policy_version=version, sha256=f"{version:064x}", full=full, delta=delta)


def stored(count: int, *, every: int) -> list[Description]:
    """The descriptions of versions 0 to ``count`` - 1."""
    made, newest = [], Description(files=(("model.safetensors", 100),), links=())
    for version in range(count):
        full = 100 if newest.is_full_due(every=every) else 0
        newest = newest.grown(link(version, full=full, delta=1 if version else 0))
        made.append(newest)
    return made


def test_every_version_can_be_made_from_one_full_version_of_its_chain() -> None:
    for version, description in enumerate(stored(100, every=8)):
        assert description.newest.policy_version == version
        full = [number for number, one in enumerate(description.links) if one.full]
        assert len(full) == 1
        assert all(one.delta for one in description.links[full[0] + 1 :])
        assert [one.policy_version for one in description.links if one.full] == [version - version % 8]


def test_chain_begins_with_the_version_before_its_full_one() -> None:
    """A worker that has it fetches one more delta instead of the full version."""
    description = stored(10, every=8)[-1]
    assert [one.policy_version for one in description.links] == [7, 8, 9]
    assert description.objects == {"0-8.full", "0-8.delta", "0-9.delta"}


def test_version_without_a_delta_begins_a_new_chain() -> None:
    before = stored(3, every=8)[-1]
    assert before.grown(link(3, full=100, delta=0)).objects == {"0-3.full"}


@pytest.mark.parametrize(("every", "full"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (16, [0])])
def test_full_version_is_due_at_first_and_every_so_many(every: int, full: list[int]) -> None:
    assert [number for number, one in enumerate(stored(7, every=every)) if one.newest.full] == full


def test_description_reads_back_and_a_broken_one_is_refused() -> None:
    description = stored(10, every=8)[-1]
    text = description.text
    assert parse_description(text) == description
    for broken in ("", "{", "[1]", '{"files":[["a",1]],"links":[{"x":0}]}', text.replace("model.s", "../model.s")):
        with pytest.raises(WeightsError, match="cannot parse the description"):
            parse_description(broken)
