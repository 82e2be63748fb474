"""Exact deltas between two versions of weight files: gaps between changed elements, and differences of their bits.

A small optimizer step changes few weights of a narrow type, most of them to a neighbouring value. A weight is treated
as the unsigned integer of its bits, so NaN payloads and -0.0 need no special case. After MAGIC, the delta has one
record for each block with changes; ``start`` counts over all files, one after the other:

    block    start u64, itemsize u8, changed u32, gaps u32, payload u32, little-endian; then payload bytes:
    payload  deflate of: gap bytes, then the differences
    gap      unchanged elements before a changed one, as g // 255 bytes of 255 and one of g % 255
    value    new - old modulo 2^bits, in zigzag (0, -1, 1, -2, ... become 0, 1, 2, 3, ...), byte-shuffled: the lowest
             byte of all values, then the second, ...; neighbouring values differ only in the lowest

A delta has no end marker, so its user must verify the result's checksum.
Tests: tests/unit/weights/test_delta.py.
"""

from __future__ import annotations

import bisect
import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import WeightsError

Bytes = NDArray[np.uint8]
Section = tuple[int, int, int]
"""(start, stop, itemsize): bytes of a file that hold elements of one width. ``start`` is a multiple of itemsize."""

MAGIC: Final = b"delta-1\n"
BLOCK_BYTES: Final = 8 * 2**20
_HEAD: Final = struct.Struct("<QBIII")
_ESCAPE: Final = 255
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LEVEL: Final = 1


def encode(files: Iterable[tuple[Bytes, Bytes, Iterable[Section]]]) -> Iterator[bytes]:
    """Yield the delta of (old u8[N], new u8[N], sections) of each file, block by block.

    A file's sections must cover all of it.
    """
    yield MAGIC
    offset = 0
    for old, new, sections in files:
        if len(old) != len(new):
            raise ValueError(f"a delta needs files of equal size, got {len(old)} and {len(new)} bytes")
        for start, stop, itemsize in sections:
            for first in range(start, stop, BLOCK_BYTES):
                last = min(first + BLOCK_BYTES, stop)
                if block := _encode_block(old[first:last], new[first:last], start=offset + first, itemsize=itemsize):
                    yield block
        offset += len(old)


def apply(files: Sequence[Bytes], delta: Iterable[bytes]) -> None:
    """Turn ``files``, u8[N] each with the old version, into the new version in place. Raises WeightsError if malformed.

    ``delta``: its bytes, in pieces of any size. A delta of other weights is not detected: verify the checksum.
    """
    stream = _Stream(delta)
    if stream.take(len(MAGIC)) != MAGIC:
        raise WeightsError("not a delta")
    starts = [0, *itertools.accumulate(len(file) for file in files)]
    while head := stream.take(_HEAD.size):
        if len(head) < _HEAD.size:
            raise WeightsError("the delta is truncated")
        start, *rest = _HEAD.unpack(head)
        _require(start < starts[-1])
        number = bisect.bisect_right(starts, start) - 1
        _apply_block(files[number], stream, start - starts[number], *rest)


def _encode_block(old: Bytes, new: Bytes, *, start: int, itemsize: int) -> bytes:
    kind = _UNSIGNED[itemsize]
    before, after = np.ascontiguousarray(old).view(kind), np.ascontiguousarray(new).view(kind)
    positions = np.flatnonzero(before != after)
    if not len(positions):
        return b""
    gaps = _gap_bytes(np.diff(positions, prepend=-1) - 1)
    planes = _zigzag(after[positions] - before[positions]).view(np.uint8).reshape(-1, itemsize).T
    compressor = zlib.compressobj(_LEVEL, strategy=zlib.Z_RLE)
    payload = compressor.compress(gaps.tobytes()) + compressor.compress(planes.tobytes()) + compressor.flush()
    return _HEAD.pack(start, itemsize, len(positions), len(gaps), len(payload)) + payload


def _apply_block(
    weights: Bytes, stream: _Stream, start: int, itemsize: int, num_changed: int, num_gaps: int, num_bytes: int
) -> None:
    length = num_gaps + num_changed * itemsize
    _require(itemsize in _UNSIGNED and start % itemsize == 0)
    _require(num_gaps + num_changed + num_bytes <= 8 * BLOCK_BYTES)  # upper bound for a block
    data = _inflate(stream.take(num_bytes), length)
    positions = _positions(data[:num_gaps])
    planes = data[num_gaps:].reshape(itemsize, num_changed)
    stop = len(weights) - (len(weights) - start) % itemsize
    elements = weights[start:stop].view(_UNSIGNED[itemsize])
    _require(len(positions) == num_changed and (not num_changed or int(positions[-1]) < len(elements)))
    elements[positions] += _unzigzag(np.ascontiguousarray(planes.T).view(_UNSIGNED[itemsize]).reshape(-1))


def _gap_bytes(gaps: NDArray[np.int64]) -> Bytes:
    ends = np.cumsum(gaps // _ESCAPE + 1)
    found = np.full(int(ends[-1]), _ESCAPE, np.uint8)
    found[ends - 1] = gaps % _ESCAPE
    return found


def _positions(gap_bytes: Bytes) -> NDArray[np.int64]:
    """Return the positions of changed elements: each is one position after its gap."""
    is_end = gap_bytes != _ESCAPE
    found: NDArray[np.int64] = np.cumsum(gap_bytes, dtype=np.int64)[is_end] + np.arange(np.count_nonzero(is_end))
    return found


def _zigzag(differences: NDArray[Any]) -> NDArray[Any]:
    bits = differences.dtype.itemsize * 8
    one, sign = differences.dtype.type(1), differences.dtype.type(bits - 1)
    found: NDArray[Any] = (differences << one) ^ (np.zeros_like(differences) - (differences >> sign))
    return found


def _unzigzag(values: NDArray[Any]) -> NDArray[Any]:
    one = values.dtype.type(1)
    found: NDArray[Any] = (values >> one) ^ (np.zeros_like(values) - (values & one))
    return found


def _inflate(payload: bytes, length: int) -> Bytes:
    """Decompress to exactly ``length`` bytes, without using more memory."""
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(payload, length + 1)
    except zlib.error as error:
        raise WeightsError(f"cannot decompress the delta: {error}") from error
    _require(len(data) == length and decompressor.eof and not decompressor.unused_data)
    return np.frombuffer(data, np.uint8)


def _require(condition: bool) -> None:
    if not condition:
        raise WeightsError("the delta does not fit these weights")


class _Stream:
    """Reads a sequence of byte strings as one stream."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = bytearray()

    def take(self, count: int) -> bytes:
        """Return ``count`` bytes; fewer only at the end."""
        while len(self._rest) < count and (piece := next(self._pieces, None)) is not None:
            self._rest += piece
        taken = bytes(self._rest[:count])
        del self._rest[:count]
        return taken
