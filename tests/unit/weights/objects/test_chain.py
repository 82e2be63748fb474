"""The cheapest path to the newest weights, and the objects that must be kept for it."""

from __future__ import annotations

import pytest

from asyncrl.errors import WeightsError
from asyncrl.weights.objects import chain
from asyncrl.weights.objects.chain import Chain, Link


def link(version: int, *, full: int = 0, delta: int = 1) -> Link:
    return Link(incarnation=0, policy_version=version, sha256=f"{version:064x}", full=full, delta=delta)


LINKS: Chain = (link(0, full=100, delta=0), *map(link, range(1, 8)), link(8, full=100), link(9), link(10))


def fetched(*at_hand: int, lost: set[str] | None = None, links: Chain = LINKS) -> set[str]:
    found = chain.route(links, at_hand={links[number] for number in at_hand}, lost=lost or set())
    assert found is not None
    return found.objects


def test_who_has_the_version_before_fetches_what_changed() -> None:
    assert fetched(9) == {"0-10.delta"}


def test_who_missed_some_fetches_all_that_changed_since() -> None:
    assert fetched(2, 6) == {"0-7.delta", "0-8.delta", "0-9.delta", "0-10.delta"}


def test_who_has_nothing_fetches_the_last_whole_one_and_what_changed_since() -> None:
    assert fetched() == {"0-8.full", "0-9.delta", "0-10.delta"}


def test_the_way_of_fewest_bytes_is_taken() -> None:
    links = (link(0, full=100, delta=0), link(1, delta=60), link(2, delta=60), link(3, full=100, delta=60))
    assert fetched(0, links=links) == {"0-3.full"}
    assert fetched(2, links=links) == {"0-3.delta"}


def test_what_is_lost_is_gone_around() -> None:
    assert fetched(9, lost={"0-10.delta", "x"}, links=(*LINKS[:-1], link(10, full=100))) == {"0-10.full"}
    assert fetched(lost={"0-8.full"}) == {"0-0.full", *(f"0-{number}.delta" for number in range(1, 11))}
    assert chain.route(LINKS, at_hand=LINKS[:-1], lost={"0-10.delta"}) is None


def test_a_version_stored_only_whole_is_no_step_of_a_way() -> None:
    links = (link(0, full=100, delta=0), link(1, full=100, delta=0), link(2))
    assert fetched(0, links=links) == {"0-1.full", "0-2.delta"}


def test_every_kept_version_can_be_reached_and_little_more_is_kept() -> None:
    links: Chain = ()
    for version in range(100):
        is_full = chain.is_full_due(links, every=8)
        one = link(version, full=100 if is_full else 0, delta=1 if version else 0)
        links = chain.grown(links, one, keep=4, behind=8)
        assert links[-1].policy_version == version
        for end in range(max(0, len(links) - 4), len(links)):
            assert chain.route(links[: end + 1], at_hand=(), lost=()) is not None
        assert min(version + 1, 4) <= len(links) <= 4 + 8
        assert len([one for one in links if one.full]) <= 2
    assert [one.policy_version % 8 for one in links if one.full] == [0]


def test_who_has_fallen_behind_by_no_more_than_a_round_goes_over_deltas_past_a_whole_one() -> None:
    links: Chain = ()
    stored: dict[int, Link] = {}
    for version in range(40):
        is_full = chain.is_full_due(links, every=8)
        stored[version] = link(version, full=100 if is_full else 0, delta=1 if version else 0)
        links = chain.grown(links, stored[version], keep=4, behind=8)
        base = stored[max(0, version - 8)]
        way = chain.route(links, at_hand={base}, lost=())
        assert way is not None
        assert (way.base, way.is_at_hand) == (base, True)


def test_where_only_wholes_are_stored_no_more_than_the_kept_versions_are() -> None:
    links: Chain = ()
    for version in range(20):
        links = chain.grown(links, link(version, full=100, delta=0), keep=4, behind=16)
    assert [one.policy_version for one in links] == [16, 17, 18, 19]


def test_a_whole_one_is_due_at_first_and_every_so_many() -> None:
    assert chain.is_full_due((), every=3)
    assert not chain.is_full_due((link(0, full=1),), every=3)
    assert not chain.is_full_due((link(0, full=1), link(1)), every=3)
    assert chain.is_full_due((link(0, full=1), link(1), link(2)), every=3)
    assert chain.is_full_due((link(0, full=1),), every=1)


def test_a_description_reads_back_and_a_broken_one_is_refused() -> None:
    assert chain.from_text(chain.to_text(LINKS)) == LINKS
    for broken in ("", "{", "[1]", '[{"incarnation": 0}]'):
        with pytest.raises(WeightsError, match="cannot parse the description"):
            chain.from_text(broken)
