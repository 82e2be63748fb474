"""A connection to nats-server closes whatever state it is in."""

from __future__ import annotations

import nats.errors
import pytest

from asyncrl.bus.jetstream.connection import Connection


class Client:
    """As nats-py is while the server's end of the connection is just closing."""

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
