"""Messages larger than the server's limit: their pieces, and the message that replaces them on their own topic."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from asyncrl.messages.validation import require

MOST_PIECES: Final = 4096
"""Most pieces of one message; each piece takes one request."""
DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some of a message's bytes.

    Topic ``pieces``, key WORKER/GROUP/DIGEST: rollout worker -> learner. DIGEST is the SHA-256 of ``data``, in
    hexadecimal.
    """

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InPieces:
    """Replaces a large message and names its pieces.

    num_bytes  size of the message
    digests    SHA-256 of each piece, in order, 32 bytes each
    """

    num_bytes: int
    digests: bytes

    def __post_init__(self) -> None:
        require(self.num_bytes > 0, f"num_bytes must be > 0, got {self.num_bytes}")
        count, rest = divmod(len(self.digests), DIGEST_BYTES)
        require(0 < count <= MOST_PIECES and not rest, f"digests have {len(self.digests)} bytes")

    @property
    def each(self) -> list[str]:
        """Digest of each piece, in hexadecimal."""
        starts = range(0, len(self.digests), DIGEST_BYTES)
        return [self.digests[start : start + DIGEST_BYTES].hex() for start in starts]


def digest_of(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()
