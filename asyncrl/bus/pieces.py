"""Messages larger than the server takes: their bytes in pieces on ``pieces``, and on their own topic what names these.

    pieces        GROUP/DIGEST -> Piece    stored first, each under the digest of its bytes
    trajectories  KEY -> InPieces          stored last, signed: once it is there, so is the message

Nothing on ``pieces`` is overwritten, and nobody knows a digest before its bytes, so no worker can take the place of
another's piece; nor does a key there hold the group's ticket. A writer that is killed in between leaves pieces that
nothing names. They leave the bus, like those of a message, when no entry is under the group's key and it is over
(``Bus.trim``). A message whose pieces are gone, or are not those of their digests, does not decode.

Tests: tests/contracts/test_bus_pieces.py, tests/integration/bus/test_pieces.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

from asyncrl.bus.encoding import Opened, opened, sealed
from asyncrl.errors import MessageError, MessageTooLarge
from asyncrl.messages.codec import decode, encode, is_encoded
from asyncrl.messages.pieces import DIGEST_BYTES, MOST_PIECES, InPieces, Piece, digest_of
from asyncrl.messages.signing import Signatures
from asyncrl.messages.topics import PIECES, Topic, public_part
from asyncrl.protocols import Bus

M = TypeVar("M")

HEAD_BYTES: Final = 64
"""More than what is around the data in a Piece, or around the digests in an InPieces."""


def most_bytes(*, max_group_bytes: int, max_log_bytes: int) -> int:
    """Of a message in pieces: what the user allows, and no more than half of what may be stored at once."""
    return min(max_group_bytes, max_log_bytes // 2)


class Pieces:
    """Of one bus."""

    def __init__(
        self,
        bus: Bus,
        *,
        most: int,
        signatures: Signatures,
        fetch: Callable[[str], Awaitable[bytes | None]],
        remove: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        """most: bytes of a message;  fetch: what is stored under a key of ``pieces``;  remove: such keys"""
        self._bus, self._most, self._signatures = bus, most, signatures
        self._fetch, self._remove = fetch, remove

    async def sealed(self, topic: Topic[M], message: M, *, key: str) -> bytes:
        """What to store under ``key``: the message, or what names its pieces, once these are stored.

        Raises MessageTooLarge, and BusFull where there is no room for all pieces: those stored are found the next time.
        """
        data, limit = encode(message), self._bus.max_message_bytes
        if topic.is_in_pieces and len(data) > limit:
            data = encode(await self._stored(topic, key, data, piece_bytes=max(1, limit - HEAD_BYTES)))
        return sealed(data, topic=topic, key=key, limit=limit, signatures=self._signatures)

    async def _stored(self, topic: Topic[Any], key: str, data: bytes, *, piece_bytes: int) -> InPieces:
        most = min(self._most, piece_bytes * min(MOST_PIECES, piece_bytes // DIGEST_BYTES))
        if len(data) > most:
            raise MessageTooLarge(
                f"{topic.name} {key}: the message has {len(data):,} bytes, {most:,} are allowed; raise "
                f"bus.max_group_bytes (and bus.max_log_bytes to twice as much) or lower rollout.group_size or "
                f"rollout.max_new_tokens"
            )
        there = await self._bus.keys(PIECES)  # of a try before, when there was no room
        view, digests = memoryview(data), bytearray()
        for start in range(0, len(data), piece_bytes):
            piece = view[start : start + piece_bytes]
            digests += (digest := digest_of(piece))
            await asyncio.sleep(0)  # others of this process have their turn
            if (piece_key := f"{public_part(key)}/{digest.hex()}") not in there:
                await self._bus.publish(PIECES, Piece(data=bytes(piece)), key=piece_key)
        return InPieces(num_bytes=len(data), digests=bytes(digests))

    async def opened(self, topic: Topic[M], *, key: str, data: bytes) -> tuple[Opened[M], int]:
        """The message under ``key`` of a log, and its size in bytes."""
        content = self._signatures.open(topic, key, data)
        if content.problem or not (topic.is_in_pieces and is_encoded(content.data, InPieces)):
            return opened(data, topic, key=key, signatures=self._signatures), len(data)
        try:
            body = await self._joined(key, decode(content.data, InPieces))
        except MessageError as error:
            return Opened(None, str(error)), len(data)
        if body is None:
            return Opened(None, "pieces of it are not on the bus", is_missing=True), len(data)
        return opened(data, topic, key=key, signatures=self._signatures, body=body), len(body)

    async def _joined(self, key: str, whole: InPieces) -> bytes | None:
        """None where a piece is missing. Raises MessageError for other bytes than those that were published."""
        if whole.num_bytes > self._most:
            raise MessageError(f"it has {whole.num_bytes:,} bytes in pieces, {self._most:,} are allowed")
        body = bytearray()
        for number, digest in enumerate(whole.each):
            piece_key = f"{public_part(key)}/{digest}"
            if (data := await self._fetch(piece_key)) is None:
                return None
            found = opened(data, PIECES, key=piece_key, signatures=self._signatures)
            if found.message is None or digest_of(found.message.data).hex() != digest:
                raise MessageError(f"piece {number} of it is damaged: {found.problem or 'its digest is another'}")
            body += found.message.data
            if len(body) > whole.num_bytes:
                break
        if len(body) != whole.num_bytes:
            raise MessageError(f"its pieces have {len(body):,} bytes, it says {whole.num_bytes:,}")
        return bytes(body)

    async def tidy(self, topic: Topic[Any], *, is_over: Callable[[str], bool] | None) -> None:
        """Remove the pieces under public parts of keys that are over, and that no entry of the log has."""
        if not topic.is_in_pieces or is_over is None:
            return
        stored = await self._bus.keys(PIECES)
        if over := {name for name in map(_owner, stored) if is_over(name)}:
            over -= set(map(public_part, await self._bus.keys(topic)))
            await self._remove([key for key in stored if _owner(key) in over])


def _owner(piece_key: str) -> str:
    return piece_key.partition("/")[0]
