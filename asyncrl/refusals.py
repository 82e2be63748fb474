"""What came and was not taken: counted each time, said once of its kind and sender, so that no peer can fill a log."""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("asyncrl.refused")

_MOST_KINDS: Final = 1000
"""Whoever invents senders gets one more line, and no memory of ours."""
_MOST_CHARACTERS: Final = 500


class Refusals:
    """One per bus connection; its total is the metric ``bus/refused``."""

    def __init__(self) -> None:
        self.total = 0
        self.counts: dict[tuple[str, str, str], int] = {}
        """(where, kind, sender) -> how often."""

    def note(self, where: str, problem: str, *, kind: str = "malformed", sender: str = "") -> bool:
        """Count it; True for the first of its kind and sender, which is logged.

        where: the topic or service; sender: who is known to have sent it; problem: the text for a person
        """
        self.total += 1
        row = (where, kind, sender)
        if row not in self.counts and len(self.counts) >= _MOST_KINDS:
            row = (where, "others", "")
        self.counts[row] = self.counts.get(row, 0) + 1
        if self.counts[row] > 1:
            return False
        by = f" by {sender[:100]!r}" if sender else ""
        log.warning("%s: refused%s: %s (the next of this kind are only counted)", where, by, problem[:_MOST_CHARACTERS])
        return True
