"""The set of done numbers among 0, 1, 2, …: a watermark and the few numbers beyond it.

It is used for group ids (trained, dropped, failed or filtered: never again) and for log sequences (read and disposed
of). It stays small however long the run is, because the done numbers are nearly contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Ledger:
    """A set that contains every number below ``watermark``, and the larger numbers in ``beyond``."""

    def __init__(self, watermark: int = 0, beyond: Iterable[int] = ()) -> None:
        self.watermark = watermark
        self.beyond: set[int] = set()
        for number in beyond:
            self.add(number)

    def add(self, number: int) -> bool:
        """Add ``number``; return False if it was already in the set."""
        if number in self:
            return False
        self.beyond.add(number)
        while self.watermark in self.beyond:
            self.beyond.remove(self.watermark)
            self.watermark += 1
        return True

    def __contains__(self, number: int) -> bool:
        return number < self.watermark or number in self.beyond

    def __len__(self) -> int:
        return self.watermark + len(self.beyond)

    def as_json(self) -> dict[str, Any]:
        return {"watermark": self.watermark, "beyond": sorted(self.beyond)}

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Ledger:
        return cls(table["watermark"], table["beyond"])
