"""What loads of new weights cost the answers in progress: tokens that were lost, or sampled twice.

Before each load it is noted how many tokens each generation has, and its newest ones. When the generation ends, a token
that was there before a load and is missing was lost; one that is another now was sampled twice. In flight both are 0.
Tests: tests/actors/rollout/test_update_account.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import EngineError
from asyncrl.protocols import Generation, PartialGeneration

_TAIL: Final = 16
"""Tokens of a generation that are compared: what is sampled anew begins behind the last token that was kept."""


@dataclass(slots=True, eq=False)
class Followed:
    """A generation in progress. marks: at each load, how many tokens it had, and the last of them"""

    partial: PartialGeneration
    marks: list[tuple[int, NDArray[np.int32]]] = field(default_factory=list)

    def mark(self) -> int:
        """Returns how many tokens it has."""
        count = self.partial.num_tokens
        tail = self.partial.so_far(max(0, count - _TAIL)).tokens
        count = max(0, count - _TAIL) + len(tail)  # without the newest, which may not count
        self.marks.append((count, tail))
        return count


class UpdateAccount:
    """Of one engine, since its process started.

    carried    tokens of answers in progress, at each load
    lost       of these, that the answer lacked in the end, or that went with a generation that failed in a load
    resampled  of these, that were others when it ended
    """

    def __init__(self) -> None:
        self._running: set[Followed] = set()
        self._is_loading = False
        self.carried = self.lost = self.resampled = 0

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Inside, the engine loads other weights."""
        for followed in self._running:
            self.carried += followed.mark()
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    @contextlib.contextmanager
    def following(self, partial: PartialGeneration) -> Iterator[list[Generation]]:
        """Inside, a generation runs; what it gave is put into the list."""
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
