"""A connection to nats-server closes in any state, opens within its time limit or fails, and loses no cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors
import pytest

from asyncrl.bus.jetstream.connection import Connection, new_inbox
from asyncrl.errors import NoAnswer


class Client:
    """A client like nats-py's while the server is closing its end of the connection."""

    servers = ("nats://127.0.0.1:4222",)

    def __init__(self, error: Exception) -> None:
        self.error, self.is_asked = error, False

    async def close(self) -> None:
        self.is_asked = True
        raise self.error


@pytest.mark.parametrize(
    "error",
    [TypeError("'NoneType' object is not callable"), ConnectionResetError(), nats.errors.ConnectionClosedError()],
    ids=["asyncio of Python 3.12", "reset", "closed"],
)
async def test_connection_closes_while_it_is_being_lost(error: Exception) -> None:
    connection = Connection("nats://127.0.0.1:4222")
    connection._client = client = Client(error)
    await connection.close()
    assert client.is_asked


async def test_open_ends_in_time_even_if_an_attempt_swallows_the_cancellation() -> None:
    """Python 3.11's wait_for loses the cancellation when both come at once; nats-py would then retry without end."""

    async def refused(_server: object) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionRefusedError from None

    connection = Connection("nats://127.0.0.1:9")
    connection._client._connect_to_server = refused
    with pytest.raises(NoAnswer, match=r"127\.0\.0\.1:9: no response"):
        await connection.open("nats://127.0.0.1:9", options={}, inbox="inbox", seconds=0.01)


class Recorder:
    """A client that records the subjects on which replies are expected."""

    def __init__(self) -> None:
        self.replies: list[str] = []

    async def publish(self, subject: str, data: bytes, *, reply: str, headers: Any) -> None:
        self.replies.append(reply)


async def test_subjects_of_replies_cannot_be_predicted() -> None:
    connection = Connection("nats://127.0.0.1:9")
    connection._client = Recorder()
    connection._inbox = "_INBOX.mine.rollout-worker"
    for _ in range(50):
        assert await connection._request_once("subject", b"", None, seconds=1e-6) is None
    places = {reply.removeprefix("_INBOX.mine.rollout-worker.") for reply in connection._client.replies}
    places |= {new_inbox("_INBOX.mine.rollout-worker") for _ in range(50)}
    assert len(places) == 100
    assert len({place[-8:] for place in places}) == 100
