"""Requests larger than a message: their bytes go to ``grading_pieces``, and a small request names the pieces.

    grading_pieces  KEY/NUMBER -> Piece              put first
    grading         KEY -> GradingRequest(in_pieces) published last

The pieces stay until the request is answered. Both the sender and the reward worker remove them, because the sender may
be gone. The pieces of a request that is never answered expire after an hour, like an answer that is never read, unless
the sender still waits and puts them again. Tests: tests/actors/test_grading_pieces.py.
"""

from __future__ import annotations

import asyncio
from typing import Final

from asyncrl.bus.port import Bus
from asyncrl.errors import MessageError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.grading import GradingRequest
from asyncrl.messages.pieces import DIGEST_BYTES, MOST_PIECES, InPieces, Piece, digest_of
from asyncrl.messages.topics import GRADING_PIECES

HEAD_BYTES: Final = 64
"""Upper bound on the bytes around the data in a Piece."""


async def in_pieces(bus: Bus, request: GradingRequest, *, key: str) -> GradingRequest:
    """Return a request that fits into a message, with its pieces stored. Raises MessageError if it is too large."""
    data = encode(request)
    if len(data) <= bus.max_message_bytes:
        return request
    each = max(1, bus.max_message_bytes - HEAD_BYTES)
    most = each * min(MOST_PIECES, each // DIGEST_BYTES)
    if len(data) > most:
        raise MessageError(
            f"it has {len(data):,} bytes, but at most {most:,} are possible; raise bus.max_message_bytes"
        )
    view, digests = memoryview(data), bytearray()
    for number, start in enumerate(range(0, len(data), each)):
        piece = bytes(view[start : start + each])
        digests += digest_of(piece)
        await bus.put(GRADING_PIECES, Piece(data=piece), key=f"{key}/{number}")
        await asyncio.sleep(0)  # let other tasks of this process run
    return GradingRequest(in_pieces=InPieces(num_bytes=len(data), digests=bytes(digests)), worker=request.worker)


async def whole(bus: Bus, request: GradingRequest, *, key: str) -> GradingRequest | None:
    """Return the original request; None if a piece is missing. Raises MessageError if the pieces are not its own."""
    if request.in_pieces is None:
        return request
    found = await bus.states(GRADING_PIECES, under=f"{key}/")
    body = bytearray()
    for number, digest in enumerate(request.in_pieces.each):
        if (piece := found.get(f"{key}/{number}")) is None:
            return None
        if digest_of(piece.data).hex() != digest:
            raise MessageError(f"piece {number} of it is damaged")
        body += piece.data
    asked = decode(bytes(body), GradingRequest, is_bounded=True)
    if asked.in_pieces is not None:
        raise MessageError("its pieces contain another request in pieces")
    return asked


async def remove(bus: Bus, request: GradingRequest, *, key: str) -> None:
    """Remove the pieces of an answered request."""
    if request.in_pieces is not None:
        await bus.forget(GRADING_PIECES, key=f"{key}/")
