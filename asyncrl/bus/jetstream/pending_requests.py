"""Requests of one connection that wait for a reply.

Clients of one role may listen to each other's inboxes, so reply subjects must not be predictable. Each request has a
random subject. A client that listens learns the subject only when the reply itself arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import Forbidden


@dataclass(slots=True)
class _Request:
    subject: str
    answer: asyncio.Future[Any]


class PendingRequests:
    """``inbox``, ``answers``: subject prefixes for replies from JetStream and from other clients."""

    def __init__(self, *, inbox: str, answers: str) -> None:
        self._prefix = inbox
        self.inbox, self.answers = new_inbox(inbox), new_inbox(answers)
        self.num_bytes = 0  # of requests without a reply
        self._requests: dict[str, _Request] = {}
        self._problem = ""  # why no replies can arrive

    def new_inbox(self) -> str:
        """Return a subject for many messages, such as those of a consumer."""
        return new_inbox(self._prefix)

    @contextlib.contextmanager
    def added(self, subject: str, *, num_bytes: int, inbox: str) -> Iterator[tuple[str, asyncio.Future[Any]]]:
        """Register a request. Yield its reply subject and its reply; the reply is None if none can arrive any more.

        Raises Forbidden.
        """
        if self._problem:
            raise Forbidden(self._problem)
        place = secrets.token_hex(8)
        request = self._requests[place] = _Request(subject, asyncio.get_running_loop().create_future())
        self.num_bytes += num_bytes
        try:
            yield f"{inbox}.{place}", request.answer
        finally:
            del self._requests[place]
            self.num_bytes -= num_bytes

    async def on_answer(self, message: Any) -> None:
        request = self._requests.get(message.subject.rpartition(".")[2])
        if request is not None and not request.answer.done():
            request.answer.set_result(message)

    def give_up(self) -> None:
        """Answer all requests with None: the connection is lost, so no reply can arrive."""
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_result(None)

    def forbid(self, what: str, subject: str, *, problem: str) -> bool:
        """Fail requests to ``subject`` immediately, as no reply will come. nats-py reports the subject in lower case.

        what  publish or subscription

        Return False if there were no such requests, so the error has not been reported yet.
        """
        is_inbox = what == "subscription" and subject == f"{self.inbox}.*".lower()
        if is_inbox:
            self._problem = problem
        has_heard = False
        for request in self._requests.values():
            is_its = is_inbox or (what == "publish" and request.subject.lower() == subject)
            if is_its and not request.answer.done():
                request.answer.set_exception(Forbidden(problem))
                has_heard = True
        return has_heard


def new_inbox(prefix: str) -> str:
    return f"{prefix}.{secrets.token_hex(11)}"
