"""Which states of others than the learner are new: an old one that somebody says again is not taken.

A reader remembers the newest order (signing.py) of each speaker under each key. In a cluster an answer may lag by some
seconds, so what was the newest LAG_SECONDS ago, or up to twice as long, is still taken. And the newest itself is old
when nothing newer came for several times as long as the bus keeps it: the bus does not have it by then unless somebody
put it there again. Time is the reader's own monotonic clock alone. Tests: tests/unit/messages/test_freshness.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

LAG_SECONDS: Final = 5.0
LIVES: Final = 3
"""So many times what the bus keeps a state for, the newest is taken."""
MOST: Final = 8192
"""Speakers that are remembered. Anybody with the bus's password may make keys; who is up is heard, and stays."""

Order = tuple[int, int]
"""(life, sequence) of a message."""
Place = tuple[str, str, str]
"""Topic, key and the speaker's public key."""


@dataclass(slots=True)
class _Heard:
    """floor: what is older than it is old;  since: when newest came;  last: what was newest at last_at"""

    newest: Order
    since: float
    floor: Order
    last: Order
    last_at: float


class Freshness:
    """clock: in seconds, monotonic"""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[Place, _Heard] = {}

    def is_old(self, place: Place, order: Order, *, seconds_to_live: float) -> bool:
        """Whether a message was said before; if not, it is remembered. seconds_to_live: on the bus; 0: for ever"""
        now = self._clock()
        heard = self._heard.pop(place, None) or _Heard(order, now, (0, 0), order, now)
        self._heard[place] = heard  # the last ones are those that spoke last
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
        """To be remembered over a restart."""
        return {place: heard.newest for place, heard in self._heard.items()}

    def remember(self, newest: Mapping[Place, Order]) -> None:
        """What an earlier life of this process had heard."""
        now = self._clock()
        for place, order in list(newest.items())[-MOST:]:
            self._heard[place] = _Heard(order, now, order, order, now)
