"""Encoding and decoding of messages. Both buses share it so that they behave the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.errors import ConfigError, MessageError, MessageTooLarge, OtherSchema
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.topics import Topic

M = TypeVar("M")
T = TypeVar("T")


class Each(AsyncIterator[T], Generic[T]):
    """An endless iterator. Its ``anext`` may be cancelled and called again, unlike a generator's."""

    def __init__(self, take: Callable[[], Awaitable[T]]) -> None:
        self._take = take

    async def __anext__(self) -> T:
        return await self._take()


def encoded(message: object, *, topic: Topic[Any], key: str, limit: int) -> bytes:
    """Encode a message. Raises MessageTooLarge."""
    data = encode(message)
    check_size(data, topic=topic, key=key, limit=limit)
    return data


def check_size(data: bytes, *, topic: Topic[Any], key: str, limit: int) -> None:
    """Raise MessageTooLarge if a message is larger than the bus allows."""
    if len(data) > limit:
        raise MessageTooLarge(
            f"{topic.name} {key}: the message has {len(data):,} bytes, the bus allows {limit:,}; raise "
            f"bus.max_message_bytes (max_payload of the nats-server) or lower rollout.group_size or "
            f"rollout.max_new_tokens"
        )


@dataclass(frozen=True, slots=True)
class Opened(Generic[M]):
    """A decoded message.

    message     None if the bytes do not decode
    problem     why they do not decode
    is_missing  some pieces of the message are not on the bus
    """

    message: M | None
    problem: str = ""
    is_missing: bool = False


def opened(data: bytes, topic: Topic[M], *, key: str) -> Opened[M]:
    """Decode a message. Raises ConfigError if the learner has another schema."""
    try:
        message = decode(data, topic.message_type, is_bounded=not topic.is_learners)
    except OtherSchema as error:
        if topic.is_learners:  # the whole run has that schema, so nothing of it can be read here
            raise ConfigError(f"{topic.name} of this run: {error}") from None
        return Opened(None, str(error))
    except MessageError as error:
        return Opened(None, str(error))
    if topic.sender and (topic.kind == "state" or "/" in key):
        writer, name = key.partition("/")[0], getattr(message, topic.sender)
        if name != writer:  # the server lets nobody write under another's name, so the message lies
            return Opened(None, f"bears the name {name[:100]!r} but was written by {writer[:100]!r}")
    return Opened(message)
