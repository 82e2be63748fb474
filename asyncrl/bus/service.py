"""Questions and answers beside the topics: nothing is stored, and who asks learns soon that nobody is there.

Both buses serve through ``Line``: questions that came and nobody took yet. Bytes that are no question are logged and
left unanswered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from asyncrl.codec import decode, encode
from asyncrl.errors import MessageError
from asyncrl.topics import Service

logger = logging.getLogger(__name__)

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

    def __init__(self, service: Service[Q, A]) -> None:
        self._service = service
        self._waiting: asyncio.Queue[Asked[Q, A]] = asyncio.Queue()

    def add(self, data: bytes, send: Send) -> None:
        try:
            question = decode(data, self._service.question_type)
        except MessageError as error:
            logger.warning("%s: not a question: %s", self._service.name, error)
            return
        self._waiting.put_nowait(Asked(question, send))

    async def take(self) -> Asked[Q, A]:
        return await self._waiting.get()
