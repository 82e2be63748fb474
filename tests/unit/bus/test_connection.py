"""A connection to nats-server closes in any state, and opens within its time limit or fails."""

from __future__ import annotations

import asyncio

import nats.errors
import pytest

from asyncrl.bus.jetstream.connection import Connection
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
async def test_it_closes_while_it_is_being_lost(error: Exception) -> None:
    connection = Connection("nats://127.0.0.1:4222")
    connection._client = client = Client(error)  # type: ignore[assignment]
    await connection.close()
    assert client.is_asked


async def test_opening_ends_when_its_time_is_over_though_the_attempt_that_fails_then_loses_the_cancellation() -> None:
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
