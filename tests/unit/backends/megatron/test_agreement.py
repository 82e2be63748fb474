"""Ranks agree whether a failure on one rank happened on all ranks that it meets in every layer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.rank_commands import Place


def agreements(*, ranks: int, together: int, seconds: float) -> list[Agreement]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    places = [Place(rank=rank, ranks=ranks, host="", port=0, timeout_seconds=seconds) for rank in range(ranks)]
    return [
        Agreement(store, place, peers=range(ranks)[place.rank - place.rank % together :][:together]) for place in places
    ]


def test_ranks_that_hold_one_copy_agree_when_all_of_them_failed_and_again_the_next_time() -> None:
    made = agreements(ranks=4, together=2, seconds=120.0)[2:]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            assert all(threads.map(Agreement.all_failed, made, ["in the loss"] * 2))


def test_ranks_that_failed_at_different_places_all_learn_that_they_do_not_agree() -> None:
    """One of them is a micro-batch further. They would go on with different collectives."""
    made = agreements(ranks=4, together=2, seconds=120.0)[2:]
    with ThreadPoolExecutor(2) as threads:
        assert not any(threads.map(Agreement.all_failed, made, ["in pass 1", "in pass 2"]))


def test_one_that_failed_alone_does_not_agree_and_nor_does_a_peer_that_fails_after_it() -> None:
    first, second, *_ = agreements(ranks=4, together=2, seconds=0.02)
    assert not first.all_failed("")
    assert not second.all_failed("")


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_holds_a_whole_copy_has_nobody_to_ask(ranks: int) -> None:
    assert agreements(ranks=ranks, together=1, seconds=0.0)[-1].all_failed("")
