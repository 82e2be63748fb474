"""The delta between two weight files: exact for all bit patterns, small for few changes, refused if invalid."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights import delta

WIDTHS = st.sampled_from([1, 2, 4, 8])


@st.composite
def pairs(draw: Any) -> tuple[bytes, bytes, list[delta.Section]]:
    """Draw two files with some sections, anything from equal to completely different."""
    sections, old, new = [], b"", b""
    for itemsize in sorted(draw(st.lists(WIDTHS, max_size=3)), reverse=True):
        count = draw(st.integers(0, 400))
        generator = np.random.default_rng(draw(st.integers(0, 2**32)))
        before = generator.integers(0, 256, count * itemsize, np.uint8)
        after = before.copy()
        changed = generator.random(count * itemsize) < draw(st.sampled_from([0.0, 0.003, 0.1, 1.0]))
        after[changed] = generator.integers(0, 256, int(changed.sum()), np.uint8)
        sections.append((len(old), len(old) + len(before), itemsize))
        old, new = old + before.tobytes(), new + after.tobytes()
    return old, new, sections


def array(data: bytes) -> delta.Bytes:
    return np.frombuffer(bytearray(data), np.uint8)


def encoded(old: bytes, new: bytes, sections: list[delta.Section]) -> bytes:
    return b"".join(delta.encode([(array(old), array(new), sections)]))


def applied(old: bytes, pieces: list[bytes]) -> bytes:
    weights = array(old)
    delta.apply([weights], pieces)
    return weights.tobytes()


@given(st.lists(pairs(), min_size=1, max_size=3), st.integers(1, 50))
@settings(max_examples=60)
def test_applied_delta_gives_the_new_files_to_the_bit(files: list[tuple[bytes, bytes, Any]], piece: int) -> None:
    found = b"".join(delta.encode((array(old), array(new), sections) for old, new, sections in files))
    weights = [array(old) for old, _, _ in files]
    delta.apply(weights, [found[start : start + piece] for start in range(0, len(found), piece)])
    assert [file.tobytes() for file in weights] == [new for _, new, _ in files]


def test_special_floats_are_bit_patterns_like_any_other() -> None:
    old = np.array([0x7FC0, 0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0x3F80, 0x0001], np.uint16)
    new = np.array([0x7FC1, 0x7FC0, 0x0000, 0x0000, 0x8000, 0xFF80, 0x3F80, 0x8001], np.uint16)
    found = encoded(old.tobytes(), new.tobytes(), [(0, 16, 2)])
    assert applied(old.tobytes(), [found]) == new.tobytes()


def test_delta_of_two_percent_neighbour_steps_takes_one_percent() -> None:
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, 2**20, np.uint16)
    new = old + (generator.random(2**20) < 0.02) * generator.choice(np.array([1, 0xFFFF], np.uint16), 2**20)
    found = encoded(old.tobytes(), new.tobytes(), [(0, 2**21, 2)])
    assert len(found) / 2**21 < 0.012  # entropy of 16 bits: 0.141 bits of place, 0.02 of direction: 0.0101


@given(pairs(), st.data())
@settings(max_examples=60)
def test_damaged_delta_is_refused_or_fits_and_never_writes_out_of_bounds(
    pair: tuple[bytes, bytes, Any], data: Any
) -> None:
    old, new, sections = pair
    found = bytearray(encoded(old, new, sections))
    for place in data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=3)):
        found[place] ^= data.draw(st.integers(1, 255))
    weights = array(old)
    with contextlib.suppress(WeightsError):  # any other error fails the test
        delta.apply([weights], [bytes(found[: data.draw(st.integers(1, len(found)))])])
    assert len(weights) == len(old)


def test_block_that_claims_gigabytes_allocates_none() -> None:
    head = struct.pack("<QBIII", 0, 1, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    with pytest.raises(WeightsError, match="does not fit"):
        applied(bytes(100), [delta.MAGIC, head])
