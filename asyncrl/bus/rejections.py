"""Rejected messages: all are counted; the first of each kind and sender is logged, so no peer can flood the log."""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("asyncrl.rejected")

_MOST_KINDS: Final = 1000
"""Bounds log and memory against a peer that invents sender names."""
_MOST_CHARACTERS: Final = 500


class Rejections:
    """One per bus connection; its total is the metric ``bus/rejected``."""

    def __init__(self) -> None:
        self.total = 0
        self.counts: dict[tuple[str, str, str], int] = {}
        """(where, kind, sender) -> count."""

    def note(self, where: str, problem: str, *, kind: str = "malformed", sender: str = "") -> bool:
        """Count one rejection. Return True for the first of its kind and sender, which is also logged.

        where    topic or service
        problem  text for the log: what is wrong
        sender   name of the sender, if known
        """
        self.total += 1
        row = (where, kind, sender)
        if row not in self.counts and len(self.counts) >= _MOST_KINDS:
            row = (where, "others", "")
        self.counts[row] = self.counts.get(row, 0) + 1
        if self.counts[row] > 1:
            return False
        by = f" by {sender[:100]!r}" if sender else ""
        log.warning(
            "%s: rejected%s: %s (the next of this kind are only counted)", where, by, problem[:_MOST_CHARACTERS]
        )
        return True
