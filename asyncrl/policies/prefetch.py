"""How many prompt groups a worker fetches ahead, so that it has work while messages are on their way."""

from __future__ import annotations

import math
from typing import Final

ROUND_TRIPS: Final = 3.0
"""Round trips to cover: one for the request, one for a lost packet, one that requests may wait at the server."""
MOST: Final = 64
_NOTHING: Final = 0.1


def groups_ahead(*, groups_per_second: float, round_trip_seconds: float) -> int:
    """Return how many groups to fetch ahead, 0 to MOST.

    The result is 0 next to the server, so that no worker holds groups that another worker could start now.

    groups_per_second   groups that the worker finishes per second
    round_trip_seconds  round trip of a small message to the bus
    """
    begun_meanwhile = groups_per_second * ROUND_TRIPS * round_trip_seconds
    return min(MOST, max(0, math.ceil(begun_meanwhile - _NOTHING)))
