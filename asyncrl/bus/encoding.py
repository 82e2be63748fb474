"""Encoding and decoding of messages. Both buses share it so that they behave the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.errors import ConfigError, MessageError, MessageTooLarge, OtherSchema
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.signing import Seen, Signatures
from asyncrl.messages.topics import Topic

M = TypeVar("M")
T = TypeVar("T")


class Each(AsyncIterator[T], Generic[T]):
    """An endless iterator. Its ``anext`` may be cancelled and called again, unlike a generator's."""

    def __init__(self, take: Callable[[], Awaitable[T]]) -> None:
        self._take = take

    async def __anext__(self) -> T:
        return await self._take()


def encoded(message: object, *, topic: Topic[Any], key: str, limit: int, signatures: Signatures) -> bytes:
    """Encode and sign a message. Raises MessageTooLarge."""
    return sealed(encode(message), topic=topic, key=key, limit=limit, signatures=signatures)


def sealed(data: bytes, *, topic: Topic[Any], key: str, limit: int, signatures: Signatures) -> bytes:
    """Sign the bytes of a message. Raises MessageTooLarge."""
    if len(data) > limit:
        raise MessageTooLarge(
            f"{topic.name} {key}: the message has {len(data):,} bytes, the bus allows {limit:,}; raise "
            f"bus.max_message_bytes (max_payload of the nats-server) or lower rollout.group_size or "
            f"rollout.max_new_tokens"
        )
    return signatures.seal(topic, key, data)


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


def opened(
    data: bytes,
    topic: Topic[M],
    *,
    key: str,
    signatures: Signatures,
    seen: Seen | None = None,
    body: bytes | None = None,
) -> Opened[M]:
    """Verify and decode a message. Raises ConfigError if the learner has another schema.

    seen  as in ``Signatures.open``
    body  bytes of the message if ``data`` only names its pieces (pieces.py)
    """
    content = signatures.open(topic, key, data, seen=seen)
    if content.problem:
        return Opened(None, content.problem)
    try:
        message = decode(content.data if body is None else body, topic.message_type, is_bounded=not topic.is_learners)
        if topic.speaker:
            name = getattr(message, topic.speaker)
            if problem := signatures.impostor(topic, key, data, name=name):
                return Opened(None, problem)
        return Opened(message)
    except OtherSchema as error:
        if topic.is_learners:  # the whole run has that schema, so nothing of it can be read here
            raise ConfigError(f"{topic.name} of this run: {error}") from None
        return Opened(None, str(error))
    except MessageError as error:
        return Opened(None, str(error))
