"""Rejects old states of senders other than the learner, which another client may publish again.

A reader remembers the newest order (signing.py) of each speaker under each key. In a cluster a reply may lag by some
seconds, so the message that was newest LAG_SECONDS ago, or up to twice as long ago, is still accepted. The newest
message itself becomes old if no newer one comes for LIVES times its time to live: by then the bus has dropped it, so
another client must have published it again. Time is only the reader's own monotonic clock.
Tests: tests/unit/messages/test_freshness.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

LAG_SECONDS: Final = 5.0
LIVES: Final = 3
"""Multiple of a state's time to live for which the newest message is accepted."""
MOST: Final = 8192
"""Number of speakers to remember. Any client with the bus's password may create keys; live speakers stay remembered."""

Order = tuple[int, int]
"""Life and sequence of a message."""
Place = tuple[str, str, str]
"""Topic, key and the speaker's public key."""


@dataclass(slots=True)
class _Heard:
    """floor: messages older than this are old;  since: when ``newest`` came;  last: what was newest at ``last_at``"""

    newest: Order
    since: float
    floor: Order
    last: Order
    last_at: float


class Freshness:
    """Remembers what each speaker said last. ``clock``: monotonic, in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[Place, _Heard] = {}

    def is_old(self, place: Place, order: Order, *, seconds_to_live: float) -> bool:
        """Whether a message is too old. The newest message so far is remembered.

        seconds_to_live: time that the bus keeps the message; 0: forever
        """
        now = self._clock()
        heard = self._heard.pop(place, None) or _Heard(order, now, (0, 0), order, now)
        self._heard[place] = heard  # at the end: the dictionary is ordered by the last message
        if len(self._heard) > MOST:
            del self._heard[next(iter(self._heard))]
        if now - heard.since >= LAG_SECONDS:
            heard.floor = heard.newest
        elif now - heard.last_at >= LAG_SECONDS:
            heard.floor, heard.last, heard.last_at = heard.last, heard.newest, now
        if order > heard.newest:
            heard.newest, heard.since = order, now
        elif order == heard.newest:
            return bool(seconds_to_live) and now - heard.since > LIVES * seconds_to_live
        return order < heard.floor

    def newest(self) -> dict[Place, Order]:
        """What to remember across a restart."""
        return {place: heard.newest for place, heard in self._heard.items()}

    def remember(self, newest: Mapping[Place, Order]) -> None:
        """Restore what an earlier life of this process had heard."""
        now = self._clock()
        for place, order in list(newest.items())[-MOST:]:
            self._heard[place] = _Heard(order, now, order, order, now)
