"""Values are counted before any object is created: bytes that encode millions of objects are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import MessageError
from asyncrl.messages import TrajectoryGroup, replace
from asyncrl.messages.codec import BYTES_A_VALUE, MOST_VALUES, decode, encode, has_more_values
from asyncrl.version import SCHEMA
from tests.harness.packed import Ext, packb
from tests.unit.messages.test_messages import SAMPLES

DEEPEST = 1022
"""A number of levels at which Python's ``repr`` fails."""

EXTENSIONS = st.builds(Ext, st.integers(0, 127), st.binary(max_size=300))
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary() | EXTENSIONS
)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["x" * 300, bytes(70_000)]),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(count(key) + count(item) for key, item in value.items())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(value=VALUES)
def test_every_value_counts_once(value: Any) -> None:
    data = packb(value)
    assert not has_more_values(data, count(value))
    assert has_more_values(data, count(value) - 1)


IN_A_PROCESS_OF_ITS_OWN = """
import json, sys, tracemalloc
from asyncrl.errors import MessageError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.codec import decode

for line in sys.stdin:
    data = bytes.fromhex(line)
    tracemalloc.start()
    try:
        decode(data, TrajectoryGroup, is_bounded=True)
        refusal = ""
    except MessageError as error:
        refusal = str(error)
    print(json.dumps([refusal, tracemalloc.get_traced_memory()[1]]))
    tracemalloc.stop()
"""


def refusals(*messages: bytes) -> list[tuple[str, int]]:
    """Return the error of each message and the peak memory of its decoding in bytes. Runs in a separate process,
    because tracing covers all threads."""
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
    lines = "".join(f"{data.hex()}\n" for data in messages)
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=True)
    said = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(said) == len(messages)
    return said


def test_malformed_array_head_costs_no_memory() -> None:
    shape = Ext(1, b"\xff" + bytes(400_000))
    fields = {"group_id": 1, "prompt_tokens": shape, "trajectories": []}
    ((refusal, most),) = refusals(packb(("TrajectoryGroup", SCHEMA, fields)))
    assert refusal
    assert most < 500_000, "a copy of its bytes, and no list of numbers"


def test_large_group_is_far_below_the_limit_of_values() -> None:
    """512 answers, each sampled by fifty versions, use less than half of the limit."""
    sample = SAMPLES[TrajectoryGroup]
    answer = sample.trajectories[0]
    spans = tuple(replace(answer.version_spans[0], start=10 * number) for number in range(50))
    tokens = [7] * 500
    answers = [
        replace(
            answer,
            tokens=tokens,
            response_mask=[True] * 500,
            behavior_logprobs=[-1.0] * 500,
            teacher_logprobs=[-1.0] * 500,
            version_spans=spans,
        )
        for _ in range(512)
    ]
    data = encode(replace(sample, trajectories=tuple(answers)))
    assert not has_more_values(data, (MOST_VALUES + len(data) // BYTES_A_VALUE) // 2)
    assert decode(data, TrajectoryGroup, is_bounded=True).group_id == sample.group_id


@pytest.mark.parametrize("depth", [100, 990, 1000, 1010, DEEPEST])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1a"])
@pytest.mark.parametrize("place", ["kind", "schema", "fields", "field", "name"])
def test_deep_nesting_is_refused_anywhere(place: str, level: bytes, depth: int) -> None:
    nested = level * depth + b"\xc0"
    name, schema = packb("TrajectoryGroup"), packb(SCHEMA)
    data = {
        "kind": b"\x93" + nested + schema + b"\x80",
        "schema": b"\x93" + name + nested + b"\x80",
        "fields": b"\x93" + name + schema + nested,
        "field": b"\x93" + name + schema + b"\x81" + packb("group_id") + nested,
        "name": b"\x93" + name + schema + b"\x81" + packb("other") + nested,
    }[place]
    with pytest.raises(MessageError) as error:
        decode(data, TrajectoryGroup)
    assert len(str(error.value)) < 1000
