"""Whether what went wrong on one rank went wrong on all that it meets in a layer: only then they are at the same place.

Ranks that share layers, rows or experts meet in every layer. One that fails alone leaves its peers in a collective
which nothing else may be paired with, so they cannot tell each other there; they do so through the store they joined
by.
Tests: tests/unit/backends/megatron/test_agreement.py, test_ranks.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store

from asyncrl.backends.megatron.rank_commands import Place

WAIT_SECONDS: Final = 60.0
"""Peers fail with the same data within moments of one another, and long before a collective's wait for us fails."""


class Agreement:
    """One per rank. Every failure on which its peers do not agree must end it: they count them alike."""

    def __init__(self, store: Store, place: Place, *, peers: Sequence[int]) -> None:
        """peers: the ranks that meet in every layer; the place's own may be among them."""
        self._store = store
        self._rank = place.rank
        self._peers = [rank for rank in peers if rank != place.rank]
        self._wait = timedelta(seconds=min(WAIT_SECONDS, place.timeout_seconds / 2))
        self._failures = 0

    def all_failed(self) -> bool:
        """This rank failed. Whether all of its peers did, too."""
        if not self._peers:
            return True
        self._failures += 1
        own, *peers = (f"asyncrl/failed/{rank}/{self._failures}" for rank in (self._rank, *self._peers))
        self._store.set(own, "")
        try:
            self._store.wait(peers, self._wait)
        except RuntimeError:  # nobody came, or the leader is gone
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(own)  # a peer whose wait for us fails later does not agree with us
            return False
        return True
