"""Requests that read much run in a few threads of their own; when these are busy, browsers are told to ask again."""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiohttp import web

from asyncrl.board.feed import MOST_ASKED, THREADS, Readers


async def test_excess_requests_are_told_to_retry_without_blocking_others() -> None:
    readers, others = Readers("test"), Readers("others")
    gate, running, most = threading.Event(), 0, 0
    lock = threading.Lock()

    def read(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert gate.wait(60)
        with lock:
            running -= 1
        return number

    asked = [asyncio.ensure_future(readers.run(read, number)) for number in range(MOST_ASKED)]
    await asyncio.sleep(0)
    with pytest.raises(web.HTTPServiceUnavailable) as refused:
        await readers.run(read, MOST_ASKED)
    assert refused.value.headers["Retry-After"] == "2"
    assert await others.run(lambda: "read") == "read"
    assert await asyncio.to_thread(lambda: "read") == "read"
    gate.set()
    assert await asyncio.gather(*asked) == list(range(MOST_ASKED))
    assert most <= THREADS
    assert await readers.run(read, 7) == 7
    for each in (readers, others):
        each.close()
