"""A browser that does not keep up does not slow other browsers."""

from __future__ import annotations

import asyncio

from asyncrl.board.feed import MOST_BROWSERS, MOST_WAITING, Hub


async def test_everybody_gets_what_is_new_in_one_piece() -> None:
    hub = Hub()
    one, other = hub.join(), hub.join()
    assert one is not None and other is not None
    hub.tell(0, {"kind": "rows"})
    hub.tell(1, {"kind": "marks"})
    expected = b'data: {"run":0,"kind":"rows"}\n\ndata: {"run":1,"kind":"marks"}\n\n'
    assert one.take() == other.take() == expected


async def test_slow_browser_reloads_the_state() -> None:
    hub = Hub()
    browser = hub.join()
    assert browser is not None
    for _ in range(MOST_WAITING + 1):
        hub.tell(0, {"kind": "rows"})
    assert browser.take() == b'data: {"kind":"restart"}\n\n'


async def test_browsers_are_bounded() -> None:
    hub = Hub()
    joined = [hub.join() for _ in range(MOST_BROWSERS)]
    assert hub.join() is None
    assert joined[0] is not None
    hub.leave(joined[0])
    assert hub.join() is not None
    await asyncio.sleep(0)
