"""The likeliest tokens at each place of an answer, with their logprobs: as much of a distribution as can be sent.

The policy's own come with its tokens (rollout.top_logprobs), a teacher's with its scores (teacher.top_logprobs). Losses
over them: losses/centered.py, losses/distillation.py.

    sampled   a            b            tokens    a x    y b
    likeliest {a .6, x .3} {y .5, b .4} logprobs  log of .6 .3 and .5 .4

Tests: tests/unit/messages/test_likeliest.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.validation import require

_POSITIVE_LOGPROB: Final = 1e-3
"""Rounding; a logprob is at most 0."""
_MOST_MASS: Final = 1.01
"""Sum of the probabilities of some tokens, with rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeliest:
    """The K likeliest tokens at each place of a text of T tokens.

    tokens    i32[T, K], different in each row
    logprobs  f32[T, K]; -inf for all K where nothing was sampled
    """

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def __post_init__(self) -> None:
        for name, array, dtype in (("tokens", self.tokens, np.int32), ("logprobs", self.logprobs, np.float32)):
            require(
                array.ndim == 2 and array.dtype == dtype,
                f"{name} of likeliest tokens must have two dimensions of {np.dtype(dtype)}, has {array.ndim} of "
                f"{array.dtype}",
            )
        require(
            self.tokens.shape == self.logprobs.shape,
            f"likeliest tokens are {self.tokens.shape} and their logprobs {self.logprobs.shape}",
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def count(self) -> int:
        """K."""
        return int(self.tokens.shape[1])

    @classmethod
    def of(cls, places: Sequence[Sequence[tuple[float, int]]]) -> Likeliest:
        """Return those of a text from the (logprob, token) at each place, equally many at each. Raises ValueError."""
        if not places:
            return NONE
        count = len(places[0])
        if not count or any(len(place) != count for place in places):
            raise ValueError("places have different numbers of likeliest tokens, or none")
        both = np.array(places, np.float64).reshape(len(places), count, 2)
        return cls(tokens=both[..., 1].astype(np.int32), logprobs=both[..., 0].astype(np.float32))

    def first(self, count: int) -> Likeliest:
        """Return those of the first ``count`` tokens."""
        return Likeliest(tokens=self.tokens[:count], logprobs=self.logprobs[:count])

    def after(self, count: int) -> Likeliest:
        """Return those of the tokens after the first ``count``."""
        return Likeliest(tokens=self.tokens[count:], logprobs=self.logprobs[count:])


NONE: Final = Likeliest()


def join(parts: Sequence[tuple[int, Likeliest]]) -> Likeliest:
    """Return those of texts that follow each other.  parts: number of tokens of each, and its likeliest; may be NONE"""
    width = max((one.count for _, one in parts), default=0)
    if not width:
        return NONE
    whole = [one if one.count else unknown(count, width) for count, one in parts]
    return Likeliest(
        tokens=np.concatenate([one.tokens for one in whole]), logprobs=np.concatenate([one.logprobs for one in whole])
    )


def unknown(num_tokens: int, width: int) -> Likeliest:
    """Return ``width`` tokens without any probability at each of ``num_tokens`` places."""
    shape = (num_tokens, width)
    return Likeliest(tokens=np.zeros(shape, np.int32), logprobs=np.full(shape, -np.inf, np.float32))


def check_likeliest(likeliest: Likeliest, *, num_tokens: int, name: str) -> None:
    """Raise MessageError unless ``likeliest`` is of ``num_tokens`` tokens, with probabilities, or empty."""
    if not likeliest.count:
        return
    require(len(likeliest) == num_tokens, f"{name} is of {len(likeliest)} tokens, and the text has {num_tokens}")
    logprobs = likeliest.logprobs
    require(not np.isnan(logprobs).any(), f"{name} holds NaN")
    require(float(logprobs.max()) <= _POSITIVE_LOGPROB, f"{name} holds a logprob above 0")
    mass = np.exp(logprobs.astype(np.float64)).sum(-1)
    require(float(mass.max()) <= _MOST_MASS, f"{name} has tokens whose probabilities add up to {float(mass.max()):.4g}")
