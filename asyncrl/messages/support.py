"""The support of sampled tokens: those that top_p and top_k left to sample each from.

The engine reports it, and the trainer normalises over the same tokens: log p(a) - log sum of p over the support. A
trainer that truncated its own logits, which differ in the last bits or are of newer weights, would keep other tokens,
and the ratio of trainer to behavior would compare different action spaces.

    sampled        a   b   c          counts  2     0     3          0: all tokens of the vocabulary
    from {a, x}, all, {c, y, z}       tokens  a x         c y z

Tests: tests/unit/messages/test_support.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.validation import check_array, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The support of each token of a text of T tokens.

    counts  i32[T], number of tokens in the support; 0: the whole vocabulary. Empty: 0 for all of them
    tokens  i32[sum of counts], the supports one after the other
    """

    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        check_array(self, "counts", np.int32)
        check_array(self, "tokens", np.int32)
        require(int(self.counts.min(initial=0)) >= 0, "a support has a count below 0")
        total = int(self.counts.sum(dtype=np.int64))
        require(total == len(self.tokens), f"a support has {len(self.tokens)} tokens, and its counts say {total}")

    @classmethod
    def of(cls, supports: Sequence[Sequence[int] | NDArray[np.int32]]) -> Support:
        """Return the support of a text from that of each token; an empty one is the whole vocabulary."""
        if not any(map(len, supports)):
            return WHOLE
        return cls(
            counts=np.array([len(one) for one in supports], np.int32),
            tokens=np.concatenate([np.asarray(one, np.int32) for one in supports]),
        )

    def first(self, count: int) -> Support:
        """Return the support of the first ``count`` tokens."""
        counts = self.counts[:count]
        return Support(counts=counts, tokens=self.tokens[: int(counts.sum())]) if len(counts) else WHOLE

    def after(self, count: int) -> Support:
        """Return the support of the tokens after the first ``count``."""
        counts = self.counts[count:]
        return (
            Support(counts=counts, tokens=self.tokens[len(self.tokens) - int(counts.sum()) :]) if len(counts) else WHOLE
        )

    def of_rows(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return i64[K] each: number n of ``rows[n]``, and a token of its support. Rows without support have none."""
        if not len(self.counts):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        counts = self.counts[rows].astype(np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(np.arange(len(rows)), counts), self.tokens[np.repeat(starts[rows], counts) + within].astype(
            np.int64
        )


WHOLE: Final = Support()
"""Every token was sampled from the whole vocabulary."""


def join(parts: Sequence[tuple[int, Support]]) -> Support:
    """Return the support of texts that follow each other.  parts: number of tokens of each, and its support"""
    if not any(len(support.tokens) for _, support in parts):
        return WHOLE
    return Support(
        counts=np.concatenate(
            [support.counts if len(support.counts) else np.zeros(count, np.int32) for count, support in parts]
        ),
        tokens=np.concatenate([support.tokens for _, support in parts]),
    )


def check_support(support: Support, *, num_tokens: int) -> None:
    """Raise MessageError unless ``support`` is of ``num_tokens`` tokens, or empty."""
    require(
        len(support.counts) in (0, num_tokens),
        f"a support is of {len(support.counts)} tokens, and the text has {num_tokens}",
    )
