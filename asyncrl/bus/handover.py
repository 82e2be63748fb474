"""What both buses do at the border between bytes and messages, so that neither promises more than the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.codec import decode, encode
from asyncrl.errors import MessageError, MessageTooLarge
from asyncrl.topics import Topic

M = TypeVar("M")
T = TypeVar("T")


class Each(AsyncIterator[T], Generic[T]):
    """An endless iterator whose ``anext`` may be cancelled and called again; a generator would be over."""

    def __init__(self, take: Callable[[], Awaitable[T]]) -> None:
        self._take = take

    async def __anext__(self) -> T:
        return await self._take()


def encoded(message: object, *, topic: Topic[Any], key: str, limit: int) -> bytes:
    """The message as bytes. Raises MessageTooLarge."""
    data = encode(message)
    if len(data) > limit:
        raise MessageTooLarge(
            f"{topic.name} {key}: a message of {len(data):,} bytes, and the bus takes {limit:,}; raise "
            f"bus.max_message_bytes (max_payload of the nats-server) or lower rollout.group_size or "
            f"rollout.max_new_tokens"
        )
    return data


@dataclass(frozen=True, slots=True)
class Opened(Generic[M]):
    """The message, or None and why not."""

    message: M | None
    problem: str = ""


def opened(data: bytes, topic: Topic[M]) -> Opened[M]:
    try:
        return Opened(decode(data, topic.message_type))
    except MessageError as error:
        return Opened(None, str(error))
