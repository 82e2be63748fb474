"""A few threads that read files for browsers, with a bounded number of waiting requests.

Reads of the feeds use other threads, so they do not wait behind any number of browsers.

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
"""Maximum number of requests in progress or waiting; further requests are told to retry."""


class Readers:
    """name: of the threads"""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"board-{name}")
        self._asked = 0

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Run ``function`` in a thread and return its result.

        Raises HTTPServiceUnavailable if too many requests wait.
        """
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
        """Close without waiting for reads in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)
