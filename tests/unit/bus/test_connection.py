"""A connection's end, and deliveries that may have been made again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats.errors
import pytest

from asyncrl.bus.encoding import Opened
from asyncrl.bus.jetstream.connection import Connection, new_inbox
from asyncrl.bus.jetstream.consumers import Arrival, JetStreamDelivery
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.errors import NoAnswer
from asyncrl.messages import PromptGroup
from asyncrl.messages.topics import PROMPTS
from tests.harness.buses import prompt


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


ACK_SECONDS = 10_000.0  # longer than any delay on a busy machine


class Listener:
    """A connection that records what it sends."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    async def request(self, subject: str, data: bytes, **_: Any) -> None:
        self.said.append(data.split()[0])

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        self.said.append(data.split()[0])


def held(listener: Listener, *, share: float) -> JetStreamDelivery[PromptGroup]:
    """A message that arrived ``share`` of ack_seconds ago."""
    layout = Layout(run="r", max_prompts=1, max_log_bytes=1, ack_seconds=ACK_SECONDS, storage="file")
    item = Arrival(
        subject=layout.subject(PROMPTS, "1"),
        data=b"",
        reply="ack",
        attempt=1,
        sequence=1,
        time=time.monotonic() - share * ACK_SECONDS,
        generation=0,
    )
    connection: Any = listener
    return JetStreamDelivery(connection, item, PROMPTS, layout, Opened(prompt(1)))


@pytest.mark.parametrize(
    ("share", "given_back", "kept"), [(0.5, [b"-NAK"], [b"+WPI"]), (0.9, [], [b"+WPI"]), (1.1, [], [])]
)
async def test_message_that_may_have_been_redelivered_is_not_returned(
    share: float, given_back: list[bytes], kept: list[bytes]
) -> None:
    """The server leases a message for ack_seconds from the moment it sends the message, which is before its arrival."""
    for move, said in (("retry", given_back), ("give_back", given_back), ("keep", kept)):
        listener = Listener()
        await getattr(held(listener, share=share), move)()
        assert listener.said == said, move


async def test_kept_message_can_be_returned() -> None:
    listener = Listener()
    delivery = held(listener, share=0.9)
    await delivery.keep()
    await delivery.retry()
    assert listener.said == [b"+WPI", b"-NAK"]


async def test_finished_work_is_acked_however_late() -> None:
    listener = Listener()
    await held(listener, share=1.1).ack()
    assert listener.said == [b"+ACK"]
