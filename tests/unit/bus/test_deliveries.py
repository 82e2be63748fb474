"""What a consumer may still tell the server about a message that it has held for long."""

from __future__ import annotations

import time
from typing import Any

import pytest

from asyncrl.bus.encoding import Opened
from asyncrl.bus.jetstream.consumers import Arrival, JetStreamDelivery
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.messages import PromptGroup
from asyncrl.messages.topics import PROMPTS
from tests.harness.buses import prompt

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
