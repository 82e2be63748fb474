"""Counts the values in a msgpack message before any of them is created.

One byte of msgpack can become a Python object of 60 bytes, and a garbage collector that walks millions of objects takes
seconds. So a reader of untrusted messages counts first. Only headers are read; the bytes of an array are skipped.

Format: https://github.com/msgpack/msgpack/blob/master/spec.md. Tests: tests/unit/messages/test_value_count.py.
"""

from __future__ import annotations

from typing import Final

_SCALARS: Final = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""First byte -> bytes of the value, including the first."""
_FIXED_EXTENSIONS: Final = {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of a text or of bytes -> width of its length in bytes."""
_EXTENSIONS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_LISTS: Final = {0xDC: 2, 0xDD: 4}
_TABLES: Final = {0xDE: 2, 0xDF: 4}


def has_more_values(data: bytes | memoryview, most: int) -> bool:
    """Whether the message has more than ``most`` values, including those inside lists and tables. In malformed or
    truncated bytes, the values before the error count."""
    position, waiting, counted, end = 0, 1, 0, len(data)
    while waiting and position < end:
        waiting -= 1
        counted += 1
        size, items = _head(data, position)
        position += size
        waiting += items
        if counted + waiting > most:
            return True
    return False


def _head(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """(bytes to the next value, number of values inside this one) for the value at ``position``."""
    first = data[position]
    if first < 0x80 or first >= 0xE0:
        return 1, 0
    if first < 0x90:
        return 1, 2 * (first & 15)
    if first < 0xA0:
        return 1, first & 15
    if first < 0xC0:
        return 1 + (first & 31), 0
    if (size := _SCALARS.get(first) or _FIXED_EXTENSIONS.get(first)) is not None:
        return size, 0
    if (width := _BYTES.get(first)) is not None:
        return 1 + width + _number(data, position, width), 0
    if (width := _EXTENSIONS.get(first)) is not None:
        return 2 + width + _number(data, position, width), 0
    if (width := _LISTS.get(first)) is not None:
        return 1 + width, _number(data, position, width)
    if (width := _TABLES.get(first)) is not None:
        return 1 + width, 2 * _number(data, position, width)
    return 1, 0  # nil, false and true; 0xc1 is unused


def _number(data: bytes | memoryview, position: int, width: int) -> int:
    return int.from_bytes(data[position + 1 : position + 1 + width], "big")
