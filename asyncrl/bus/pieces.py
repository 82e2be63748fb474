"""Splits messages that are too large for the server into pieces.

    pieces        WORKER/GROUP/DIGEST -> Piece    stored first; the key contains the digest of the piece's bytes
    trajectories  WORKER/GROUP-TICKET -> InPieces  stored last, names the pieces, and makes the message complete

The key of a piece does not contain the group's ticket. A writer that is killed halfway leaves pieces that no message
names. ``Bus.trim`` removes a worker's pieces of a group that is over once the log has no entry of the worker for it. A
message does not decode if a piece is missing or does not match its digest.

Tests: tests/contracts/test_bus_pieces.py, tests/integration/bus/test_pieces.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

from asyncrl.bus.encoding import Opened, check_size, opened
from asyncrl.bus.port import Bus
from asyncrl.errors import MessageError, MessageTooLarge
from asyncrl.messages.codec import decode, encode, is_encoded
from asyncrl.messages.pieces import DIGEST_BYTES, MOST_PIECES, InPieces, Piece, digest_of
from asyncrl.messages.topics import PIECES, Topic, public_part

M = TypeVar("M")

HEAD_BYTES: Final = 64
"""Upper bound of the bytes around the data in a Piece, and around the digests in an InPieces."""


def most_bytes(*, max_group_bytes: int, max_log_bytes: int) -> int:
    """Largest message in pieces, in bytes: the user's limit, but at most half of what the log may store."""
    return min(max_group_bytes, max_log_bytes // 2)


class Pieces:
    """Writes and reads messages in pieces on one bus."""

    def __init__(
        self,
        bus: Bus,
        *,
        most: int,
        fetch: Callable[[str], Awaitable[bytes | None]],
        remove: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        """
        most    largest message, in bytes
        fetch   returns the bytes stored under a key of ``pieces``
        remove  removes keys of ``pieces``
        """
        self._bus, self._most = bus, most
        self._fetch, self._remove = fetch, remove

    async def encoded(self, topic: Topic[M], message: M, *, key: str) -> bytes:
        """Return the bytes to store under ``key``. For a large message, store its pieces first and return their names.

        Raises MessageTooLarge, and BusFull if there is no room for all pieces. A retry reuses the pieces stored before.
        """
        data, limit = encode(message), self._bus.max_message_bytes
        if topic.is_in_pieces and len(data) > limit:
            data = encode(await self._stored(topic, key, data, piece_bytes=max(1, limit - HEAD_BYTES)))
        check_size(data, topic=topic, key=key, limit=limit)
        return data

    async def _stored(self, topic: Topic[Any], key: str, data: bytes, *, piece_bytes: int) -> InPieces:
        most = min(self._most, piece_bytes * min(MOST_PIECES, piece_bytes // DIGEST_BYTES))
        if len(data) > most:
            raise MessageTooLarge(
                f"{topic.name} {key}: the message has {len(data):,} bytes, {most:,} are allowed; raise "
                f"bus.max_group_bytes (and bus.max_log_bytes to twice as much) or lower rollout.group_size or "
                f"rollout.max_new_tokens"
            )
        there = await self._bus.keys(PIECES)  # an earlier attempt may have stored some before the bus was full
        view, digests = memoryview(data), bytearray()
        for start in range(0, len(data), piece_bytes):
            piece = view[start : start + piece_bytes]
            digests += (digest := digest_of(piece))
            await asyncio.sleep(0)  # let other tasks run
            if (piece_key := f"{public_part(key)}/{digest.hex()}") not in there:
                await self._bus.publish(PIECES, Piece(data=bytes(piece)), key=piece_key)
        return InPieces(num_bytes=len(data), digests=bytes(digests))

    async def opened(self, topic: Topic[M], *, key: str, data: bytes) -> tuple[Opened[M], int]:
        """Decode the entry ``key`` of a log. Return the message and its size in bytes."""
        if not (topic.is_in_pieces and is_encoded(data, InPieces)):
            return opened(data, topic, key=key), len(data)
        try:
            body = await self._joined(key, decode(data, InPieces))
        except MessageError as error:
            return Opened(None, str(error)), len(data)
        if body is None:
            return Opened(None, "pieces of it are not on the bus", is_missing=True), len(data)
        return opened(body, topic, key=key), len(body)

    async def _joined(self, key: str, whole: InPieces) -> bytes | None:
        """Join the pieces; None if a piece is missing. Raises MessageError if a piece is not the published one."""
        if whole.num_bytes > self._most:
            raise MessageError(f"it has {whole.num_bytes:,} bytes in pieces, {self._most:,} are allowed")
        body = bytearray()
        for number, digest in enumerate(whole.each):
            piece_key = f"{public_part(key)}/{digest}"
            if (data := await self._fetch(piece_key)) is None:
                return None
            found = opened(data, PIECES, key=piece_key)
            if found.message is None or digest_of(found.message.data).hex() != digest:
                raise MessageError(f"piece {number} of it is damaged: {found.problem or 'its digest differs'}")
            body += found.message.data
            if len(body) > whole.num_bytes:
                break
        if len(body) != whole.num_bytes:
            raise MessageError(f"its pieces have {len(body):,} bytes, it says {whole.num_bytes:,}")
        return bytes(body)

    async def tidy(self, topic: Topic[Any], *, is_over: Callable[[str], bool] | None) -> None:
        """Remove the pieces of every group that is over and has no entry in the log."""
        if not topic.is_in_pieces or is_over is None:
            return
        stored = await self._bus.keys(PIECES)
        if over := {name for name in map(_owner, stored) if is_over(name)}:
            over -= set(map(public_part, await self._bus.keys(topic)))
            await self._remove([key for key in stored if _owner(key) in over])


def _owner(piece_key: str) -> str:
    return piece_key.rpartition("/")[0]
