"""Sends what is new to every browser that looks, as server-sent events. A slow browser is told to ask anew.

Tests: tests/unit/board/test_hub.py.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any, Final

MOST_WAITING: Final = 256
"""Messages for one browser."""
MOST_BROWSERS: Final = 64


class Hub:
    def __init__(self) -> None:
        self.browsers: set[Browser] = set()

    def tell(self, run: int, change: dict[str, Any]) -> None:
        """To everybody: a change of one run."""
        if not self.browsers:
            return
        line = encoded({"run": run, **change})
        for browser in self.browsers:
            browser.put(line)

    def join(self) -> Browser | None:
        """Another browser, until ``leave``; None when there are too many."""
        if len(self.browsers) >= MOST_BROWSERS:
            return None
        browser = Browser()
        self.browsers.add(browser)
        return browser

    def leave(self, browser: Browser) -> None:
        self.browsers.discard(browser)


class Browser:
    """What waits to be sent to one of them. ``has_news``: whether anything does."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self.has_news = asyncio.Event()

    def put(self, line: bytes) -> None:
        if len(self._lines) >= MOST_WAITING:  # it does not keep up: it begins anew once it does
            self._lines.clear()
            line = encoded({"kind": "restart"})
        self._lines.append(line)
        self.has_news.set()

    def take(self) -> bytes:
        """All that waits, which is to be sent now: nobody has it any more. Empty without news."""
        data = b"".join(self._lines)
        self._lines.clear()
        self.has_news.clear()
        return data


def encoded(message: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(message) + b"\n\n"


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
