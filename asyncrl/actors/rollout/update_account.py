"""What loads of new weights cost the answers in progress: tokens that were lost or sampled twice.

Before each load, the length of each generation and its newest tokens are recorded. When a generation ends, a token that
existed before a load but is missing was lost; a token that differs was sampled twice. With in_flight loads both are 0.
Tests: tests/actors/rollout/test_update_account.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.errors import EngineError

_TAIL: Final = 16
"""Number of compared tokens of a generation: resampling begins after the last token that was kept."""


@dataclass(slots=True, eq=False)
class Followed:
    """A generation in progress. marks: at each load, its number of tokens and the last of them"""

    partial: PartialGeneration
    marks: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)

    def mark(self) -> int:
        """Record the current tokens; return their number."""
        count = self.partial.num_tokens
        tail = self.partial.so_far(max(0, count - _TAIL)).tokens
        count = max(0, count - _TAIL) + len(tail)  # without the newest token, which may be invalid
        self.marks.append((count, tail))
        return count


class UpdateAccount:
    """Counts for one engine since its process started.

    carried    tokens of answers in progress, summed over loads
    lost       of these, tokens missing in the final answer, or of generations that failed during a load
    resampled  of these, tokens that differ in the final answer
    """

    def __init__(self) -> None:
        self._running: set[Followed] = set()
        self._is_loading = False
        self.carried = self.lost = self.resampled = 0

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """While open, the engine loads other weights."""
        for followed in self._running:
            self.carried += followed.mark()
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    @contextlib.contextmanager
    def following(self, partial: PartialGeneration) -> Iterator[list[Generation]]:
        """While open, a generation runs; the caller appends its result to the list."""
        followed, ended = Followed(partial), list[Generation]()
        self._running.add(followed)
        try:
            yield ended
        except EngineError:
            if self._is_loading and followed.marks:
                self.lost += followed.marks[-1][0]
            raise
        finally:
            self._running.discard(followed)
        for generation in ended:
            self._compare(followed, generation.tokens)

    def _compare(self, followed: Followed, tokens: NDArray[np.int32]) -> None:
        for count, tail in followed.marks:
            now = tokens[max(0, count - len(tail)) : count]
            self.lost += max(0, count - len(tokens))
            self.resampled += int(np.count_nonzero(now != tail[: len(now)]))

    def numbers(self) -> dict[str, float]:
        return {
            "weights/carried_tokens": self.carried,
            "weights/lost_tokens": self.lost,
            "weights/resampled_tokens": self.resampled,
        }
