"""A server's reported version counts only after no token of older weights can be on its way."""

from __future__ import annotations

import asyncio

from asyncrl.engines.generation import Version
from asyncrl.engines.sglang.versions import SettledVersion
from asyncrl.errors import EngineError


class Server:
    """A server that answers when the test allows it."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[None]] = []
        self.version = (9, 9)

    async def ask(self) -> None:
        self.answers.append(asyncio.get_running_loop().create_future())
        await self.answers[-1]


def settling(server: Server, version: Version) -> SettledVersion:
    return SettledVersion(version, server.ask, lambda: server.version)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_stamped_version_settles_with_the_answer_to_one_request() -> None:
    server = Server()
    settled = settling(server, (0, 1))
    for _ in range(3):
        settled.note_stamp((0, 2))
        await turns()
    assert (len(server.answers), settled.newest) == (1, (0, 1))
    server.answers[0].set_result(None)
    await turns()
    assert settled.newest == (0, 2)
    settled.note_stamp((0, 2))
    await turns()
    assert len(server.answers) == 1


async def test_a_version_stamped_while_an_answer_is_awaited_needs_one_of_its_own() -> None:
    """The request may have been sent before that version was loaded."""
    server = Server()
    settled = settling(server, (0, 1))
    settled.note_stamp((0, 2))
    await turns()
    settled.note_stamp((0, 3))
    server.answers[0].set_result(None)
    await turns()
    assert settled.newest == (0, 2)
    settled.note_stamp((0, 3))
    await turns()
    server.answers[1].set_result(None)
    await turns()
    assert settled.newest == (0, 3)


async def test_a_token_of_a_request_settles_the_version_that_it_was_sent_under() -> None:
    server = Server()
    settled = settling(server, (0, 1))
    settled.request((1, 0)).note_token()
    settled.request((0, 5)).note_token()
    settled.note_stamp((1, 0))
    assert (settled.newest, server.answers) == ((1, 0), [])


async def test_a_request_that_fails_settles_nothing_and_the_next_stamp_asks_again() -> None:
    server = Server()
    settled = settling(server, (0, 1))
    settled.note_stamp((0, 2))
    await turns()
    server.answers[0].set_exception(EngineError("no response"))
    await turns()
    assert settled.newest == (0, 1)
    settled.note_stamp((0, 2))
    await turns()
    assert len(server.answers) == 2
    await settled.close()
    assert server.answers[1].cancelled()


async def test_after_an_older_load_no_token_is_newer_until_a_newer_version_settles() -> None:
    """An evaluation holds version 5 on an engine that had 9. A chunk stamped 9 and an answer to a request sent under 9
    are late. Version 10 settles with a request of its own."""
    server = Server()
    settled = settling(server, (0, 9))
    old = settled.request((0, 9))
    settled.note_load((0, 5), before=(0, 9))
    server.version = (0, 5)
    assert (settled.newest, old.newest) == ((0, 5), (0, 5))
    old.note_token()
    settled.note_stamp((0, 9))
    await turns()
    server.answers[0].set_result(None)
    await turns()
    assert (settled.newest, old.newest) == ((0, 5), (0, 5))
    settled.note_load((0, 10), before=(0, 5))
    assert old.newest == (0, 5)
    settled.request((0, 10)).note_token()
    assert (settled.newest, old.newest) == ((0, 10), (0, 10))


async def test_a_torn_transfer_does_not_hide_that_the_next_load_is_older() -> None:
    """Transfers are not noted as loads: 5 is known by its tokens only."""
    settled = settling(Server(), (0, 1))
    request = settled.request((0, 5))
    request.note_token()
    settled.note_load((0, 3), before=(-1, -1))
    assert (settled.newest, request.newest) == ((0, 3), (0, 3))
