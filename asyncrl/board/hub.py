"""Sends changes to every connected browser as server-sent events.

A browser that is too slow is told to reload the state.

Tests: tests/unit/board/test_hub.py.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any, Final

MOST_WAITING: Final = 256
"""Maximum number of messages queued for one browser."""
MOST_BROWSERS: Final = 64


class Hub:
    def __init__(self) -> None:
        self.browsers: set[Browser] = set()

    def tell(self, run: int, change: dict[str, Any]) -> None:
        """Send a change of one run to all browsers."""
        if not self.browsers:
            return
        line = encoded({"run": run, **change})
        for browser in self.browsers:
            browser.put(line)

    def join(self) -> Browser | None:
        """Add a browser until ``leave``; None if there are too many."""
        if len(self.browsers) >= MOST_BROWSERS:
            return None
        browser = Browser()
        self.browsers.add(browser)
        return browser

    def leave(self, browser: Browser) -> None:
        self.browsers.discard(browser)


class Browser:
    """The queue of one browser. ``has_news`` is set while it holds messages."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self.has_news = asyncio.Event()

    def put(self, line: bytes) -> None:
        if len(self._lines) >= MOST_WAITING:  # too slow: the browser reloads the state later
            self._lines.clear()
            line = encoded({"kind": "restart"})
        self._lines.append(line)
        self.has_news.set()

    def take(self) -> bytes:
        """Remove and return all queued messages; empty if there are none."""
        data = b"".join(self._lines)
        self._lines.clear()
        self.has_news.clear()
        return data


def encoded(message: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + as_json(message) + b"\n\n"


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
