"""Request/reply next to the topics. Nothing is stored, and a request fails quickly if no process serves it.

Both buses serve requests from a queue, ``Line``. A request that does not decode is counted and left unanswered. A reply
that does not decode is counted and treated as missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asyncrl.bus.port import Request
from asyncrl.bus.rejections import Rejections
from asyncrl.errors import MessageError
from asyncrl.messages.codec import decode
from asyncrl.messages.topics import Service

Q = TypeVar("Q")
A = TypeVar("A")


class Line(Generic[Q, A]):
    """Pending requests of one server of a service, first in, first out."""

    def __init__(self, service: Service[Q, A], rejections: Rejections) -> None:
        self._service = service
        self._rejections = rejections
        self._waiting: asyncio.Queue[Request[Q, A]] = asyncio.Queue()

    def add(self, data: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
        try:
            question = decode(data, self._service.question_type, is_bounded=True)
        except MessageError as error:
            self._rejections.note(self._service.name, f"invalid request: {error}")
            return
        self._waiting.put_nowait(Request(question, send))

    async def take(self) -> Request[Q, A]:
        return await self._waiting.get()


def answer_of(data: bytes, service: Service[Q, A], rejections: Rejections) -> A | None:
    """Decode the answer to a question; None if the bytes are no answer, as if no process had answered."""
    try:
        return decode(data, service.answer_type, is_bounded=service.served_by != ("learner",))
    except MessageError as error:
        rejections.note(service.name, f"invalid answer: {error}")
        return None
