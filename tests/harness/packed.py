"""msgpack as a foreign process may write it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.msgpack import Ext

__all__ = ["Ext", "packb", "unpackb"]


def packb(value: Any) -> bytes:
    """Encode any value, such as (name, schema, fields)."""
    return msgspec.msgpack.encode(value)


def unpackb(data: bytes) -> Any:
    """Decode any value. Extensions, such as arrays, stay as they are."""
    return msgspec.msgpack.decode(data)
