"""A dialect reads requests, and writes answers and refusals. Its refusals are OpenAI's unless it has its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from asyncrl.environments.agent.endpoint.request import Json, ModelRequest, Refused, text
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.turns import Turn

Event = tuple[str, Json]
"""Name ("" for none) and data of a server-sent event."""

DONE: Final = b"data: [DONE]\n\n"


class Dialect(ABC):
    paths: ClassVar[Sequence[str]]
    """Paths of the dialect's requests."""
    end: ClassVar[bytes] = b""
    """Bytes after the last event of a stream."""

    @abstractmethod
    def read(self, body: Json, session: Session) -> ModelRequest:
        """Convert a request's body. Raises Refused."""

    @abstractmethod
    def write(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Json: ...

    def events(self, request: ModelRequest, replies: Sequence[Turn], session: Session) -> Iterator[Event]:
        yield "", self.write(request, replies, session)

    def refuse(self, error: Refused) -> Json:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def model_name(body: Json) -> str:
    return text(body.get("model") or "", "model")


def usage(replies: Sequence[Turn]) -> Json:
    prompt = replies[0].prompt_length
    answers = sum(len(turn.answer.tokens) for turn in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": min(prompt, replies[0].answer.report.cached_tokens)},
    }


def now() -> int:
    return int(time.time())


def is_cut(turn: Turn) -> bool:
    """Whether the answer reached its token limit."""
    return turn.answer.finish_reason == "length"
