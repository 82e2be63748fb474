"""The interface of a dialect: it reads requests, and writes answers and refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from asyncrl.environments.agent.endpoint.request import Json, ModelRequest, Refused
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.turns import Turn

Event = tuple[str, Json]
"""Name ("" for none) and data of a server-sent event."""


class Dialect(Protocol):
    @property
    def paths(self) -> Sequence[str]:
        """Paths of the dialect's requests."""
        ...

    @property
    def end(self) -> bytes:
        """Bytes after the last event of a stream."""
        ...

    def read(self, body: Json, session: Session) -> ModelRequest:
        """Convert a request's body. Raises Refused."""
        ...

    def write(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Json: ...

    def events(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Iterator[Event]: ...

    def refused(self, error: Refused) -> Json: ...


DONE: Final = b"data: [DONE]\n\n"


def openai_error(error: Refused) -> Json:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def now() -> int:
    return int(time.time())


def is_cut(turn: Turn) -> bool:
    """Whether the answer reached its token limit."""
    return turn.answer.finish_reason == "length"
