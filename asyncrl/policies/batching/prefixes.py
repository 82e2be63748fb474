"""Tokens that several sequences of a packed row begin with, and that a model therefore computes once.

Samples of a group begin with the same prompt, turns of an agent with the same history. In a causal model a token's
hidden state depends only on the tokens before it, so equal prefixes have equal hidden states. A row of sequences in
lexicographic order is a tree: none of the earlier sequences shares more with a sequence than the one before it.

    a b c d      shared 0    computes a b c d
    a b c e f    shared 3    computes e f, which see a b c e f
    a b g        shared 2    computes g, which sees a b g

Tokens that an engine routed to different experts are different tokens. Pure functions of arrays; packing.py decides
what goes into a row. Test: tests/unit/policies/batching/test_prefixes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.routing import ExpertArray

MOST_COPIES: Final = 8
"""A row has at most this many tokens for each one that is computed. Every layer copies the keys and values of all of
them for a moment, so they take memory."""


def sort(tokens: Sequence[NDArray[np.int32]], experts: Sequence[ExpertArray]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the sequences' numbers in lexicographic order, and how many tokens each shares with the one before it.

    tokens   i32[T] of each sequence
    experts  [T, layers, experts per token] of each sequence; empty for all of them if they are unknown
    """
    keys = [_key(*one) for one in zip(tokens, experts, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(keys), np.int64)
    for place in range(1, len(keys)):
        before, own = order[place - 1], order[place]
        count = _count_equal(tokens[before][:, None], tokens[own][:, None])
        if count and len(experts[own]):
            count = _count_equal(*(experts[number][:count].reshape(count, -1) for number in (before, own)))
        shared[place] = count
    return order, shared


def _key(tokens: NDArray[np.int32], experts: ExpertArray) -> bytes:
    """Return 4 or 12 bytes for each token, the same for equal ones, in the order of the sequence.

    A token may have hundreds of bytes of experts, so they are in it as a sum of their words times odd numbers. If two
    tokens of different experts ever have the same one, less is shared than could be (``sort`` compares the experts).
    """
    columns = [np.ascontiguousarray(tokens, ">i4").view(np.uint8).reshape(len(tokens), -1)]
    if len(experts):
        own = np.ascontiguousarray(experts).reshape(len(tokens), -1).view(np.uint8)
        words = np.pad(own, ((0, 0), (0, -own.shape[1] % 8))).view(np.uint64)
        factors = np.random.default_rng(0).integers(0, 2**63, words.shape[1], np.uint64) * 2 + 1
        columns.append((words @ factors)[:, None].view(np.uint8))
    return np.concatenate(columns, axis=1).tobytes()


def _count_equal(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Return how many rows two arrays have in common, from the first one on."""
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else length


def shared_within(members: Sequence[int], shared: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return how many tokens each of some sequences shares with the one before it among them.

    members  places in the sorted list, rising;  shared: of the whole list (see ``sort``)
    """
    pairs = zip(members, members[1:], strict=False)
    return np.array([0, *(shared[before + 1 : place + 1].min() for before, place in pairs)][: len(members)], np.int32)


def bundles(lengths: NDArray[np.int64], shared: NDArray[np.int64], *, max_tokens: int) -> list[range]:
    """Cut a sorted list of sequences into runs that compute at most ``max_tokens`` each; one sequence may exceed it.

    A run is cut where the least is shared, and in the middle if that is in several places. Example: of two groups of
    four samples, the groups are separated first, and a group that is too long is cut into two and two samples.
    """
    before = np.concatenate([[0], np.cumsum(lengths)])  # tokens before each sequence
    found, left = list[range](), [range(len(lengths))] if len(lengths) else []
    while left:
        run = left.pop()
        inside = shared[run.start + 1 : run.stop]
        if inside.all() and (len(run) == 1 or size(lengths[run.start : run.stop], inside) <= max_tokens):
            found.append(run)
            continue
        places = run.start + 1 + np.flatnonzero(inside == inside.min())
        middle = (before[run.start] + before[run.stop]) / 2
        cut = int(places[np.abs(before[places] - middle).argmin()])
        left += [range(cut, run.stop), range(run.start, cut)]
    return found


def size(lengths: NDArray[np.int64], shared: NDArray[Any]) -> int:
    """Return how many tokens of a row a bundle takes: those that are computed, and more if they have many copies."""
    total = int(lengths.sum())
    return max(total - int(shared.sum()), -(-total // MOST_COPIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctTokens:
    """The tokens of a row that are computed, U of its N, in the order of the row.

    first   i64[U]: where each of them is in the row for the first time
    of      i64[N]: which of them each token of the row is
    shared  i64[D]: how many tokens each sequence of the row shares with the one before it
    """

    first: NDArray[np.int64]
    of: NDArray[np.int64]
    shared: NDArray[np.int64]

    @classmethod
    def from_row(cls, boundaries: NDArray[np.int32], shared: NDArray[Any]) -> DistinctTokens:
        """boundaries: i32[D+1] of the row's sequences;  shared: as MicroBatch has it, empty if nothing is shared"""
        starts = boundaries[:-1].astype(np.int64)
        lengths = np.diff(boundaries).astype(np.int64)
        shared = shared.astype(np.int64) if len(shared) else np.zeros_like(lengths)
        is_first = np.arange(boundaries[-1]) - np.repeat(starts, lengths) >= np.repeat(shared, lengths)
        of = np.cumsum(is_first) - 1
        for number in np.flatnonzero(shared):  # in order: what is copied may be copied itself
            start, before, count = starts[number], starts[number - 1], shared[number]
            of[start : start + count] = of[before : before + count]
        return cls(first=np.flatnonzero(is_first), of=of, shared=shared)

    @property
    def num_copies(self) -> NDArray[np.int64]:
        """i64[U]: how many tokens of the row each of them is."""
        return np.bincount(self.of, minlength=len(self.first))
