"""Questions and answers beside the topics: nothing is stored, and who asks learns soon that nobody is there.

Both buses serve through ``Line``: questions that came and nobody took yet. Bytes that are no question are counted and
left unanswered; bytes that are no answer are counted and none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asyncrl.codec import decode, encode
from asyncrl.errors import MessageError
from asyncrl.refusals import Refusals
from asyncrl.topics import Service

Q = TypeVar("Q")
A = TypeVar("A")

Send = Callable[[bytes], Awaitable[None]]


class Asked(Generic[Q, A]):
    """See ``protocols.Asked``."""

    def __init__(self, question: Q, send: Send) -> None:
        self.question = question
        self._send = send

    async def answer(self, answer: A) -> None:
        await self._send(encode(answer))


class Line(Generic[Q, A]):
    """The questions of one server of a service, first come, first taken."""

    def __init__(self, service: Service[Q, A], refusals: Refusals) -> None:
        self._service = service
        self._refusals = refusals
        self._waiting: asyncio.Queue[Asked[Q, A]] = asyncio.Queue()

    def add(self, data: bytes, send: Send) -> None:
        try:
            question = decode(data, self._service.question_type)
        except MessageError as error:
            self._refusals.note(self._service.name, f"no question: {error}")
            return
        self._waiting.put_nowait(Asked(question, send))

    async def take(self) -> Asked[Q, A]:
        return await self._waiting.get()


def answer_of(data: bytes, service: Service[Q, A], refusals: Refusals) -> A | None:
    """None when the bytes are no answer: as if nobody were there."""
    try:
        return decode(data, service.answer_type)
    except MessageError as error:
        refusals.note(service.name, f"no answer: {error}")
        return None
