"""Lets a failed rank find out whether all ranks that it meets in every layer failed at the same place.

Ranks that share layers, rows or experts meet in collectives in every layer. If one rank fails alone, its peers wait in
a collective that must not be paired with any other. So ranks report failures through the store that they joined by.
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
"""Peers fail on the same data within moments of one another, long before their collectives time out."""


class Agreement:
    """One instance per rank. Failures are matched by number, so a rank must end if its peers do not share a failure."""

    def __init__(self, store: Store, place: Place, *, peers: Sequence[int]) -> None:
        """peers: the ranks that meet in every layer; may include this rank."""
        self._store = store
        self._rank = place.rank
        self._peers = [rank for rank in peers if rank != place.rank]
        self._wait = timedelta(seconds=min(WAIT_SECONDS, place.timeout_seconds / 2))
        self._failures = 0

    def all_failed(self, where: str) -> bool:
        """Report that this rank failed. Returns whether all of its peers failed as well, and ``where`` it did.

        Where they did not, they would go on with different collectives. All of them then learn it.
        """
        if not self._peers:
            return True
        self._failures += 1
        own, *peers = (f"asyncrl/failed/{rank}/{self._failures}" for rank in (self._rank, *self._peers))
        self._store.set(own, where)
        try:
            self._store.wait(peers, self._wait)
            return all(self._store.get(peer).decode() == where for peer in peers)
        except RuntimeError:  # a peer did not report, or the leader is gone
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(own)  # so that a peer that fails later does not agree with us
            return False
