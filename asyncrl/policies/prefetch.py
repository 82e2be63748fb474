"""How many prompt groups a worker keeps ready beyond those it has room for: what it begins while others travel."""

from __future__ import annotations

import math
from typing import Final

ROUND_TRIPS: Final = 3.0
"""One for the order, one for a packet lost on the way, one that orders may stand at the server."""
MOST: Final = 64
_NOTHING: Final = 0.1


def groups_ahead(*, groups_per_second: float, round_trip_seconds: float) -> int:
    """Groups, 0 to MOST. Beside the server it is 0, so that no worker keeps what another could begin now.

    groups_per_second   that the worker finishes
    round_trip_seconds  of a small message to the bus and its answer
    """
    begun_meanwhile = groups_per_second * ROUND_TRIPS * round_trip_seconds
    return min(MOST, max(0, math.ceil(begun_meanwhile - _NOTHING)))
