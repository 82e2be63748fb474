"""A server's reported version counts only after no token of older weights can be on its way."""

from __future__ import annotations

import asyncio

from asyncrl.engines.sglang.settled import SettledVersion
from asyncrl.errors import EngineError


class Server:
    """A server that answers when the test allows it."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[None]] = []

    async def ask(self) -> None:
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_stamped_version_settles_with_the_answer_to_one_request() -> None:
    server = Server()
    settled = SettledVersion((0, 1), server.ask)
    for _ in range(3):
        settled.stamped((0, 2))
        await turns()
    assert (len(server.answers), settled.newest) == (1, (0, 1))
    server.answers[0].set_result(None)
    await turns()
    assert settled.newest == (0, 2)
    settled.stamped((0, 2))
    await turns()
    assert len(server.answers) == 1


async def test_a_version_stamped_while_an_answer_is_awaited_needs_one_of_its_own() -> None:
    """The request may have been sent before that version was loaded."""
    server = Server()
    settled = SettledVersion((0, 1), server.ask)
    settled.stamped((0, 2))
    await turns()
    settled.stamped((0, 3))
    server.answers[0].set_result(None)
    await turns()
    assert settled.newest == (0, 2)
    settled.stamped((0, 3))
    await turns()
    server.answers[1].set_result(None)
    await turns()
    assert settled.newest == (0, 3)


async def test_a_token_of_a_request_settles_the_version_that_it_was_sent_under() -> None:
    server = Server()
    settled = SettledVersion((0, 1), server.ask)
    settled.answered((1, 0))
    settled.answered((0, 5))
    settled.stamped((1, 0))
    assert (settled.newest, server.answers) == ((1, 0), [])


async def test_a_request_that_fails_settles_nothing_and_the_next_stamp_asks_again() -> None:
    server = Server()
    settled = SettledVersion((0, 1), server.ask)
    settled.stamped((0, 2))
    await turns()
    server.answers[0].set_exception(EngineError("no response"))
    await turns()
    assert settled.newest == (0, 1)
    settled.stamped((0, 2))
    await turns()
    assert len(server.answers) == 2
    await settled.close()
    assert server.answers[1].cancelled()
