"""Categories of answers as metrics: reward/category/NAME, or reward/PART.category/NAME with reward.parts.

A reward names categories in words of its own, which may be texts of errors. Every name is a metric of all later steps,
so only the first MOST since the learner started have one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from asyncrl.policies.metric import Metric

MOST: Final = 64
_CATEGORY: Final = re.compile(r"(reward/(?:.*\.)?category/)(.+)")
_REST: Final = "other"


class Categories:
    """The categories that have a metric of their own."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self.has_joined = False
        """Whether a name was ever joined with others."""

    def join_rest(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return metrics in which the share of every category beyond the first MOST is in category/other.

        The shares of a batch's rarer categories come last, so the commonest names of the first batches stay.
        """
        found = {name: match for name in metrics if (match := _CATEGORY.fullmatch(name))}
        row = {name: value for name, value in metrics.items() if name not in found}
        for name in sorted(found, key=lambda one: -_share(metrics[one])):
            if name not in self._known and (len(self._known) < MOST or found[name][2] == _REST):
                self._known.add(name)
            self.has_joined |= name not in self._known
            kept = name if name in self._known else f"{found[name][1]}{_REST}"
            row[kept] = _share(row.get(kept, 0.0)) + _share(metrics[name])
        return row


def _share(value: Metric) -> float:
    assert isinstance(value, float)
    return value
