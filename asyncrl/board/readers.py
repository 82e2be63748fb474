"""Threads that read files for browsers: a few, and a bounded number of requests that wait for one.

What the feeds read does not wait behind them, however many browsers ask at once.

Tests: tests/unit/board/test_readers.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from aiohttp import web

T = TypeVar("T")

THREADS: Final = 2
MOST_ASKED: Final = 32
"""Requests that are read for, or wait; the next one is to ask again later."""


class Readers:
    """name: of the threads"""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"board-{name}")
        self._asked = 0

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What ``function`` returns. Raises HTTPServiceUnavailable when too many wait."""
        if self._asked >= MOST_ASKED:
            text = "asyncrl board: too many browsers ask for this at once; ask again\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "2"})
        self._asked += 1
        try:
            work = functools.partial(function, *arguments, **named)
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._asked -= 1

    def close(self) -> None:
        """What is being read is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
