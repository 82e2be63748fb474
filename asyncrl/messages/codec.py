"""Encodes frozen dataclasses to bytes and back: msgpack, with arrays as raw little-endian bytes. Nothing is executable.

The only file that imports msgpack, which packs, and msgspec, which builds typed values. A message is the list
[name of its type, schema, fields]. An array is an extension whose code is its dtype (``_DTYPES``) and whose bytes are
the number of dimensions (u8), the shape (u32 each) and the elements. Fields of an unknown name are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from typing import Any, Final, TypeVar

import msgpack
import msgspec
import numpy as np

from asyncrl.errors import MessageError, OtherSchema
from asyncrl.version import SCHEMA

M = TypeVar("M")

_DTYPES: Final = {1: "<i4", 2: "<i8", 3: "<f4", 4: "<f8", 5: "|b1", 6: "|u1", 7: "<u2"}
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}

FEW_BYTES: Final = 2**16
"""A message with fewer bytes cannot hold too many values."""
MOST_VALUES: Final = 2**18
BYTES_A_VALUE: Final = 16
"""Limit for untrusted messages: MOST_VALUES, plus one value per BYTES_A_VALUE bytes. An array is one value. A group has
about thirty values per answer and seven per version that sampled it. With ten tokens per version, that is one value in
18 bytes."""
_SHOWN: Final = 100
"""Characters of a foreign name to show in an error."""


def encode(message: object) -> bytes:
    """Encode a message, preceded by its type's name and schema. Raises MessageError for values that cannot be sent."""
    try:
        packed: bytes = msgpack.packb((type(message).__name__, SCHEMA, message), default=_pack)
        return packed
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MessageError(f"cannot send this: {error}") from error


def is_encoded(data: bytes | memoryview, message_type: type) -> bool:
    """Whether the bytes begin like a message of this type."""
    head: bytes = b"\x93" + msgpack.packb(message_type.__name__)
    return bytes(data[: len(head)]) == head


def decode(data: bytes | memoryview, message_type: type[M], *, is_bounded: bool = False) -> M:
    """Decode the message in ``data``. Its arrays are read-only.

    Raises MessageError for anything that is not exactly one ``message_type``; OtherSchema for one of another schema.

    is_bounded  reject more values than such a message can need, because the sender is not trusted
    """
    name = message_type.__name__
    most = MOST_VALUES + len(data) // BYTES_A_VALUE
    if is_bounded and len(data) > FEW_BYTES and has_more_values(data, most):
        raise MessageError(f"not a {name}: its {len(data):,} bytes hold more values than a message may")
    try:
        kind, schema, fields = msgspec.convert(
            msgpack.unpackb(data, ext_hook=_unpack, strict_map_key=False), tuple[str, int, Any]
        )
    except _UNREADABLE as error:
        raise MessageError(f"not a {name}: {error}") from error
    if kind != name:
        raise MessageError(f"not a {name} but a {kind[:_SHOWN]!r}")
    if schema != SCHEMA:
        raise OtherSchema(
            f"{name} has schema {schema} and this process reads schema {SCHEMA}; run the same version of asyncrl "
            "everywhere"
        )
    try:
        return msgspec.convert(fields, message_type)
    except _UNREADABLE as error:
        problem, _, path = str(error).rpartition(" - at `$")
        raise MessageError(f"{name}{path[:-1]}: {problem}" if problem else f"{name}: {error}") from error


def from_json(line: bytes, kind: type[M]) -> M:
    """Decode a line of a file to a dataclass or TypedDict. Fields of an unknown name are skipped.

    Raises ValueError for anything else, and for a number that is not finite; RecursionError for a line nested too deep.
    """
    return msgspec.json.decode(line, type=kind)


_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


@functools.cache
def _field_names(message_type: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(message_type))


def _pack(value: Any) -> Any:
    """Convert a value that msgpack does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _field_names(type(value))}
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no type of a message")
    little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
    if (code := _CODES.get(little.dtype.str)) is None:
        raise TypeError(f"arrays of {value.dtype} are not sent")
    return msgpack.ExtType(code, struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape) + little.tobytes())


def _unpack(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if code not in _DTYPES or not data:
        raise ValueError(f"extension {code} with {len(data)} bytes is no array")
    dtype, ndim = np.dtype(_DTYPES[code]), data[0]
    start = 1 + 4 * ndim
    shape = struct.unpack(f"<{ndim}I", data[1:start]) if len(data) >= start else (-1,)
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"an array of shape {shape[:8]} has {len(data)} bytes")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def has_more_values(data: bytes | memoryview, most: int) -> bool:
    """Whether the message has more than ``most`` values, including those inside lists and tables. In malformed or
    truncated bytes, the values before the error count.

    One byte of msgpack can become a Python object of 60 bytes, and a garbage collector that walks millions of objects
    takes seconds. So values are counted before any is created. Only their heads are read.
    """
    position, waiting, counted = 0, 1, 0
    while waiting and position < len(data):
        width, size, items = _HEADS[data[position]]
        length = int.from_bytes(data[position + 1 : position + 1 + width], "big") if width else 0
        # E.g. 0xdd 00 00 00 02: a list (width 4, one item each) of two values. 0xc5 01 00: 256 bytes (no items).
        position += 1 + width + size + (0 if items else length)
        waiting += -1 + (items * length if width else items)
        counted += 1
        if counted + waiting > most:
            return True
    return False


def _heads() -> list[tuple[int, int, int]]:
    """For each first byte of a value: bytes of its length, other bytes, and values inside (per unit of its length, if
    it has one). Source: https://github.com/msgpack/msgpack/blob/master/spec.md"""
    heads = [(0, 0, 0)] * 256  # small numbers, nil, booleans
    heads[0x80:0x90] = [(0, 0, 2 * pairs) for pairs in range(16)]
    heads[0x90:0xA0] = [(0, 0, items) for items in range(16)]
    heads[0xA0:0xC0] = [(0, size, 0) for size in range(32)]
    for first, widths in {0xC4: (1, 2, 4), 0xD9: (1, 2, 4)}.items():  # bytes, texts
        heads[first : first + 3] = [(width, 0, 0) for width in widths]
    heads[0xC7:0xCA] = [(width, 1, 0) for width in (1, 2, 4)]  # extensions: length, code, bytes
    heads[0xCA:0xD4] = [(0, size, 0) for size in (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)]  # numbers
    heads[0xD4:0xD9] = [(0, 1 + size, 0) for size in (1, 2, 4, 8, 16)]  # extensions of fixed length
    heads[0xDC:0xDE] = [(2, 0, 1), (4, 0, 1)]  # lists
    heads[0xDE:0xE0] = [(2, 0, 2), (4, 0, 2)]  # tables
    return heads


_HEADS: Final = _heads()
