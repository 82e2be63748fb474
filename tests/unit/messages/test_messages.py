"""Messages validate themselves; any bytes become a message or raise a MessageError."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.errors import MessageError, OtherSchema
from asyncrl.messages import (
    CallSegment,
    Event,
    GroupSegment,
    Heartbeat,
    Progress,
    PromptGroup,
    Quarantine,
    SamplingParams,
    StepMetrics,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    Wait,
    WeightVersion,
    replace,
)
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.control import FleetSize, FleetStatus, ServerAddress
from asyncrl.messages.evaluation import FIRST_GROUP_ID, Answer, Evaluation, EvaluationAnswers
from asyncrl.messages.pieces import Piece
from asyncrl.messages.topics import ALL
from asyncrl.version import SCHEMA
from tests.harness.packed import Ext, packb, unpackb

SPANS = (VersionSpan(start=0, incarnation=0, policy_version=6), VersionSpan(start=2, incarnation=1, policy_version=7))
TRAJECTORY = Trajectory(
    tokens=[3, 4, 1],
    response_mask=[True, True, False],
    behavior_logprobs=[-0.1, -0.3, 0.0],
    version_spans=SPANS,
    reward=1.0,
    reward_parts={"right": 1.0, "format": 0.0},
    finish_reason="length",
    teacher_logprobs=[-0.2, -0.5, -1.0],
)
SAMPLES: dict[type, Any] = {
    type(message): message
    for message in (
        PromptGroup(
            group_id=3,
            prompt_tokens=[9, 2, 7, 4],
            group_size=8,
            sampling=SamplingParams(max_new_tokens=16, temperature=0.7, top_p=0.9, top_k=20, ignore_eos=True),
            prompt="7+5=",
            label={"answer": [12, None, 1.5, True]},
            metadata={"level": 3, "source": "ünï"},
            epoch=2,
            min_policy_version=5,
        ),
        TrajectoryGroup(group_id=3, prompt_tokens=[9, 2], trajectories=(TRAJECTORY, TRAJECTORY), worker="w", seconds=2),
        WeightVersion(incarnation=1, policy_version=7, uri="/dev/shm/7", sha256="ab", num_bytes=2**40),
        Progress(incarnation=1, step=7, policy_version=7, groups_trained=9, finished=True),
        Heartbeat(
            actor="a",
            role="learner",
            waits=(Wait(what="trajectories", on="rollout-worker", seconds=1.5),),
            numbers={"loss": 0.25},
        ),
        GroupSegment(
            group_id=3,
            worker="w",
            calls=(
                CallSegment(
                    index=0,
                    call=1,
                    prompt_digest=b"ab",
                    start=12,
                    tokens=[3, 4, 1],
                    behavior_logprobs=[-0.1, -0.3, 0.0],
                    version_spans=SPANS,
                ),
            ),
        ),
        Quarantine(worker="w2", incarnation=1, reason="0.9 nats off"),
        Evaluation(number=3, weights=WeightVersion(incarnation=1, policy_version=7), num_prompts=5, num_pinned=2),
        EvaluationAnswers(
            number=3,
            group_id=FIRST_GROUP_ID + 3,
            dataset="aime",
            answers=(Answer(reward=1.0, length=3, version_spans=SPANS, vote="12"),),
            worker="w1",
        ),
        StepMetrics(step=7, numbers={"loss": 0.25}, staleness=(10, 30)),
        FleetSize(rollout_workers=8, request="1f"),
        FleetStatus(request="1f", rollout_workers=7, workers=("w0", "w1"), draining=("w2",), problem="no GPU is free"),
        Event(kind="dropped", actor="learner", time=1.5, data={"tokens": 17, "why": ["stale", None]}),
        Piece(data=b"ab"),
        ServerAddress(name="judge", url="http://h:1/v1", model="m", key="k"),
    )
}
TYPES = tuple(SAMPLES)
OTHER_MESSAGE = encode(SAMPLES[Progress])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and bool(a == b)


def assert_decodes_or_is_refused(data: bytes, kind: type) -> None:
    try:
        message = decode(data, kind)
    except MessageError as error:
        assert str(error)
    else:
        assert type(message) is kind
        encode(message)


# -- round trips -------------------------------------------------------------------------------------------------------


def test_every_topic_has_a_sample_here() -> None:
    assert {topic.message_type for topic in ALL} == set(TYPES)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_message_round_trips(kind: type) -> None:
    got = decode(encode(SAMPLES[kind]), kind)
    sent = SAMPLES[kind]
    if kind is TrajectoryGroup:
        sent = replace(sent, seconds=2.0)  # an int in a float field comes back as a float
    assert same(got, sent)


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50),
    logprob=st.floats(-(2.0**100), 0.0, width=32),
    reward=st.floats(allow_infinity=True, allow_nan=True),
    text=st.text(max_size=20),
)
def test_any_trajectory_round_trips(tokens: list[int], logprob: float, reward: float, text: str) -> None:
    trajectory = Trajectory(
        tokens=tokens,
        response_mask=[token % 2 == 0 for token in tokens],
        behavior_logprobs=[logprob] * len(tokens),
        version_spans=(SPANS[0],),
        reward=reward,
        reward_parts={text: 1.0},
    )
    group = TrajectoryGroup(group_id=0, prompt_tokens=tokens, trajectories=(trajectory,), worker=text)
    assert same(decode(encode(group), TrajectoryGroup), group)


def test_array_is_sent_as_its_raw_bytes() -> None:
    tokens = np.zeros(10_000, dtype=np.int32)
    assert len(encode(replace(SAMPLES[PromptGroup], prompt_tokens=tokens))) < 40_000 + 600


def test_received_message_is_read_only() -> None:
    prompt = decode(encode(SAMPLES[PromptGroup]), PromptGroup)
    with pytest.raises(ValueError, match="read-only"):
        prompt.prompt_tokens[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.group_id = 1  # type: ignore[misc]


# -- rejections ------------------------------------------------------------------------------------------------------


def tampered(kind: type, changes: dict[str, Any]) -> bytes:
    """Encode a sample with changed fields; None removes a field."""
    name, schema, fields = unpackb(encode(SAMPLES[kind]))
    fields = {key: value for key, value in (fields | changes).items() if value is not None}
    return packb((name, schema, fields))


@pytest.mark.parametrize("schema", [True, 1.5, "1", None, [1]])
def test_schema_that_is_not_a_number_is_refused(schema: object) -> None:
    name, _, fields = unpackb(OTHER_MESSAGE)
    with pytest.raises(MessageError, match=r"not a Progress: Expected `int`, .* at `\$\[1\]`"):
        decode(packb((name, schema, fields)), Progress)


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_refused(schema: object) -> None:
    name, _, fields = unpackb(OTHER_MESSAGE)
    with pytest.raises(OtherSchema, match=f"reads schema {SCHEMA}; run the same version of asyncrl everywhere"):
        decode(packb((name, schema, fields)), Progress)


def test_an_unknown_field_is_skipped() -> None:
    assert decode(tampered(Progress, {"iteration": [[3]]}), Progress) == SAMPLES[Progress]


def test_a_missing_field_is_refused_by_name() -> None:
    with pytest.raises(MessageError, match="Progress: Object missing required field `step`"):
        decode(tampered(Progress, {"step": None}), Progress)


def test_a_field_with_a_default_may_be_missing() -> None:
    assert decode(tampered(Progress, {"groups_trained": None}), Progress).groups_trained == 0


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (Progress, {"step": "7"}, "Progress.step: Expected `int`, got `str`"),
        (Progress, {"step": True}, "Progress.step: Expected `int`, got `bool`"),
        (Progress, {"finished": 1}, "Progress.finished: Expected `bool`, got `int`"),
        (Heartbeat, {"numbers": {"loss": "low"}}, r"Heartbeat.numbers\[...\]: Expected `float`, got `str`"),
        (Heartbeat, {"numbers": {3: 1.0}}, "Expected `str`, got `int`"),
        (PromptGroup, {"prompt_tokens": [1, 2]}, "PromptGroup.prompt_tokens: Expected `numpy.ndarray`, got `list`"),
        (PromptGroup, {"sampling": 3}, "PromptGroup.sampling: Expected `object`, got `int`"),
        (PromptGroup, {"group_size": 0}, "group_size must be >= 1"),
        (TrajectoryGroup, {"cancelled": 1, "failed_samples": 2}, "failed_samples is 2, of 1 rollouts"),
        (TrajectoryGroup, {"failed_samples": -1}, "failed_samples must be >= 0"),
        (TrajectoryGroup, {"trajectories": []}, "either trajectories or an error"),
        (TrajectoryGroup, {"trajectories": 5}, "TrajectoryGroup.trajectories: Expected `array`, got `int`"),
    ],
)
def test_wrong_value_is_refused_with_its_path(kind: type, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode(tampered(kind, changes), kind)


def array(code: int, shape: list[int], data: bytes) -> Ext:
    return Ext(code, struct.pack(f"<B{len(shape)}I", len(shape), *shape) + data)


@pytest.mark.parametrize(
    "value",
    [
        array(2, [1], bytes(8)),  # not i32
        array(1, [2, 2], bytes(16)),  # not one-dimensional
        array(1, [3], bytes(8)),  # shorter than its shape
        array(1, [1], bytes(8)),  # longer than its shape
        array(1, [1] * 100, bytes(4)),  # more dimensions than numpy has
        array(1, [2**32 - 1, 2**32 - 1], b""),
        array(8, [1], bytes(8)),  # no dtype
        array(-1, [1], bytes(8)),
        Ext(1, b""),
        Ext(1, b"\x02abc"),  # shorter than its head
    ],
)
def test_malformed_array_is_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        decode(tampered(PromptGroup, {"prompt_tokens": value}), PromptGroup)


def test_encoding_an_unsupported_value_raises_message_error() -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    for label in (object(), 2**70, np.array([object()]), np.array(["text"]), "half \ud800 a pair", nested):
        with pytest.raises(MessageError):
            encode(replace(SAMPLES[PromptGroup], label=label))


def test_numpy_scalars_are_sent_as_numbers() -> None:
    event = Event(kind="x", actor="a", time=0.0, data={"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)})
    assert decode(encode(event), Event).data == {"a": 0.5, "b": 3, "c": True}


# -- fuzz --------------------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=200), kind=st.sampled_from(TYPES))
@example(data=b"", kind=Progress)
@example(data=b"\xc1", kind=Progress)
@example(data=b"\x93" * 3000, kind=Progress)  # nested deeper than the stack allows
@example(data=b"\xdd\xff\xff\xff\xff", kind=Progress)  # a list of four billion
def test_random_bytes_are_refused(data: bytes, kind: type) -> None:
    with pytest.raises(MessageError, match=kind.__name__):
        decode(data, kind)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_truncation_is_refused(kind: type) -> None:
    data = encode(SAMPLES[kind])
    for length in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:length], kind)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=60)
@given(data=st.data())
def test_mutated_messages_decode_or_are_refused(kind: type, data: st.DataObject) -> None:
    mutated = bytearray(encode(SAMPLES[kind]))
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    assert_decodes_or_is_refused(bytes(mutated), kind)


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner),
    max_leaves=10,
)


@given(head=JSON_LIKE, kind=st.sampled_from(TYPES))
def test_any_msgpack_decodes_or_is_refused(head: Any, kind: type) -> None:
    assert_decodes_or_is_refused(packb(head), kind)


@pytest.mark.parametrize(
    "fields", [{"actor": "x" * 201}, {"host": "h" * 201}, {"actor": "\x1b[2J"}, {"problem": "x" * 2001}]
)
def test_names_in_a_heartbeat_are_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        Heartbeat(**({"actor": "w0", "role": "rollout-worker"} | fields))
