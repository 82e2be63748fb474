"""Encodes frozen dataclasses to bytes and back: msgpack, with arrays as raw little-endian bytes. Nothing is executable.

The only file that imports msgpack. Raises MessageError for another type or schema, unknown or missing fields, values of
the wrong type, arrays of objects, extra bytes, and everything that the message's own checks reject.

config/tables.py also builds dataclasses, but shares no code with this file. They would have about fifteen lines in
common, the walk over fields and tuples. Every rule differs: arrays and None here; choices, near names and
secrets there. A hook for each rule would cost one more call per field of every message, on the hot path.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import msgpack
import numpy as np

from asyncrl.errors import MessageError, OtherSchema
from asyncrl.messages.value_count import has_more_values
from asyncrl.version import SCHEMA

M = TypeVar("M")

_ARRAY = 1  # msgpack extension code
_DTYPES = {"<i4", "<i8", "<f4", "<f8", "|b1", "|u1", "<u2"}
_LONGEST_HEAD: Final = 128
"""Limit for the bytes of an array's dtype and shape."""

FEW_BYTES: Final = 2**16
"""A message with fewer bytes cannot hold too many values."""
MOST_VALUES: Final = 2**18
BYTES_A_VALUE: Final = 16
"""Limit for untrusted messages: MOST_VALUES, plus one value per BYTES_A_VALUE bytes. An array is one value. A group has
about thirty values per answer and seven per version that sampled it. With ten tokens per version, that is one value in
18 bytes."""
_SHOWN: Final = 100
"""Characters of foreign text or field names to show in an error."""
_NAMED: Final = 8


def encode(message: object) -> bytes:
    """Encode a message, preceded by its type's name and schema. Raises MessageError for values that cannot be sent."""
    head = (type(message).__name__, SCHEMA, _plain(message))
    try:
        return cast(bytes, msgpack.packb(head, default=_pack_array))
    except (ValueError, OverflowError) as error:  # half a surrogate pair, nested too deep, too long
        raise error if isinstance(error, MessageError) else MessageError(f"cannot send this: {error}") from error


def is_encoded(data: bytes | memoryview, message_type: type) -> bool:
    """Whether the bytes begin like a message of this type."""
    head = b"\x93" + cast(bytes, msgpack.packb(message_type.__name__))
    return bytes(data[: len(head)]) == head


def decode(data: bytes | memoryview, message_type: type[M], *, is_bounded: bool = False) -> M:
    """Decode the message in ``data``. Raises MessageError for anything that is not exactly one ``message_type``, and
    OtherSchema for one of another schema.

    is_bounded  reject more values than such a message can need, because the sender is not trusted
    """
    name = message_type.__name__
    if is_bounded and len(data) > FEW_BYTES and has_more_values(data, MOST_VALUES + len(data) // BYTES_A_VALUE):
        raise MessageError(f"not a {name}: its {len(data):,} bytes hold more values than a message may")
    try:
        head = msgpack.unpackb(data, ext_hook=_unpack_array, strict_map_key=False)
        kind, schema, fields = head
    except Exception as error:  # msgpack raises many types on hostile bytes
        raise MessageError(f"not a {name}: {error}") from error
    if kind != name:
        raise MessageError(f"not a {name} but a {_shown(kind)}")
    if type(schema) is not int or schema != SCHEMA:
        raise OtherSchema(
            f"{name} has schema {_shown(schema)} and this process reads schema {SCHEMA}; run the same version of "
            "asyncrl everywhere"
        )
    try:
        return cast(M, _builder(cast(Any, message_type))(fields))
    except _InvalidValue as error:
        raise MessageError(f"{name}{error.where}{error.problem}") from error.__cause__


def _shown(value: Any) -> str:
    """Format a foreign value for an error. A list or table is shown as its type, as it may be very large or deep."""
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN])
    return repr(value) if value is None or isinstance(value, int | float) else f"value of type {type(value).__name__}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"), copy=False)
        if little.dtype.str not in _DTYPES:
            raise MessageError(f"cannot send an array of {value.dtype}")
        head = msgpack.packb((little.dtype.str, list(little.shape)))
        return msgpack.ExtType(_ARRAY, head + little.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise MessageError(f"cannot send a {type(value).__name__}")


def _unpack_array(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    head = msgpack.Unpacker(read_size=_LONGEST_HEAD)
    head.feed(data[:_LONGEST_HEAD])
    dtype, shape = head.unpack()
    if dtype not in _DTYPES:
        raise ValueError(f"arrays of {dtype!r} are not accepted")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"arrays of shape {shape!r} are not accepted")
    return np.frombuffer(data, dtype, offset=head.tell()).reshape(shape)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _required(kind: Any) -> frozenset[str]:
    missing = dataclasses.MISSING
    return frozenset(f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing)


Builder = Callable[[Any], Any]
"""Converts what msgpack unpacked to a value of one type. Raises _InvalidValue."""


class _InvalidValue(Exception):
    """``where``: path to the invalid value within the message. Put together on the way out, because nearly all messages
    are valid."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.where = problem, ""

    def within(self, part: str) -> None:
        self.where = part + self.where


@functools.cache
def _builder(kind: Any) -> Builder:
    """Return the conversion to ``kind``. A type is looked at once, not for each value."""
    if dataclasses.is_dataclass(kind):
        return functools.partial(_build_message, cast(type, kind))
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return functools.partial(_build_tuple, options[0])
    if origin is dict:
        return functools.partial(_build_dict, options[1])
    if origin in (typing.Union, types.UnionType):
        some = next(option for option in options if option is not type(None))
        return functools.partial(_build_optional, some) if type(None) in options else _builder(some)
    if origin is np.ndarray or kind is np.ndarray:
        return _build_array
    if kind is float:
        return _build_float
    return functools.partial(_build_plain, kind) if kind in (int, str, bool, bytes) else _build_any


def _build_message(kind: type, raw: Any) -> Any:
    fields = _fields(kind)
    _check(isinstance(raw, dict), "a table of fields", raw)
    name = ""
    try:
        unknown, missing = raw.keys() - fields.keys(), _required(kind) - raw.keys()
        if unknown or missing:
            raise MessageError(f"unknown fields {_named(unknown)}, missing fields {sorted(missing)}")
        values = {}
        for name, value in raw.items():
            values[name] = _builder(fields[name])(value)
        return kind(**values)
    except _InvalidValue as error:
        error.within(f".{name}")
        raise
    except MessageError as error:
        raise _InvalidValue(f": {error}") from error


def _build_tuple(item: Any, raw: Any) -> Any:
    _check(isinstance(raw, list), "a list", raw)
    build, built = _builder(item), []
    try:
        for value in raw:
            built.append(build(value))  # noqa: PERF401 - after an error, its length says where
    except _InvalidValue as error:
        error.within(f"[{len(built)}]")
        raise
    return tuple(built)


def _build_dict(item: Any, raw: Any) -> Any:
    _check(isinstance(raw, dict) and all(isinstance(key, str) for key in raw), "a table", raw)
    build, built, key = _builder(item), {}, ""
    try:
        for key, value in raw.items():
            built[key] = build(value)
    except _InvalidValue as error:
        error.within(f".{key}")
        raise
    return built


def _build_optional(some: Any, raw: Any) -> Any:
    return None if raw is None else _builder(some)(raw)


def _build_array(raw: Any) -> Any:
    _check(isinstance(raw, np.ndarray), "an array", raw)
    return raw


def _build_float(raw: Any) -> float:
    _check(isinstance(raw, int | float) and not isinstance(raw, bool), "a number", raw)
    return float(raw)


def _build_plain(kind: type, raw: Any) -> Any:
    _check(type(raw) is kind, kind.__name__, raw)
    return raw


def _build_any(raw: Any) -> Any:
    return raw


def _check(condition: bool, expected: str, raw: Any) -> None:
    if not condition:
        raise _InvalidValue(f" must be {expected}, is {type(raw).__name__}")


def _named(fields: set[Any]) -> str:
    few = sorted(map(_shown, itertools.islice(fields, _NAMED)))
    more = f" and {len(fields) - _NAMED} more" if len(fields) > _NAMED else ""
    return f"[{', '.join(few)}]{more}"
