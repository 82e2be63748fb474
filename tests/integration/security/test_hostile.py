"""Hostile messages on the bus are rejected, counted and reported once; they cause no crash and are never trained.

Each example is a whole run of real actors with fake adapters, with MESSAGES hostile messages in between. All examples
together have 500 messages by default; a nightly run sets ASYNCRL_FUZZ_CASES=10000. The learner's own topics (LEARNERS)
receive only undecodable messages. test_permissions.py tests that no other role can write to them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.actors.learner.validator import Validator
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.rejections import Rejections
from asyncrl.bus.request_reply import Line, answer_of
from asyncrl.errors import MessageError, OtherSchema
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, WeightVersion
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.topics import (
    ALL,
    PROGRESS,
    PROMPTS,
    QUARANTINE,
    TRAJECTORIES,
    TRANSFERS,
    WEIGHTS,
    Topic,
    group_id_of,
)
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.policies.groups.tickets import Tickets
from asyncrl.policies.groups.validation import GroupValidation
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.fakes import Engine, Loop, run_worker, until, worker
from tests.harness.packed import packb, unpackb
from tests.unit.messages.test_messages import JSON_LIKE, SAMPLES, tampered

CASES = int(os.environ.get("ASYNCRL_FUZZ_CASES", "500"))
MESSAGES = 20
VOCABULARY = 64
LEARNERS = (PROMPTS, WEIGHTS, PROGRESS, QUARANTINE)
"""Topics that only the learner's role may write."""

KEYS = st.sampled_from(["", "x", "-1", "01", "٣", "1e3", "9" * 15, "9" * 200, "w0", "learner", *map(str, range(12))])
ODD_FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, 0.5, -1e30, 1e308])
ODD_INTS = st.sampled_from([0, 1, 2, -1, 3, 63, 64, 2**31 - 1, -(2**31)])
ODD_NUMBERS = st.sampled_from([0, 1, 2, 3, 9, 2**31, 2**52])


@st.composite
def trajectory_groups(draw: Any) -> bytes:
    """Groups that decode; most of them are impossible."""
    length = draw(st.sampled_from([1, 2, 4, 5000]))
    answer = Trajectory(
        tokens=np.full(length, draw(ODD_INTS), np.int32),
        response_mask=np.full(length, draw(st.booleans())),
        behavior_logprobs=np.full(length, draw(st.sampled_from([-1.0, 0.0, -1e30])), np.float32),
        version_spans=(VersionSpan(start=0, incarnation=draw(ODD_NUMBERS), policy_version=draw(ODD_NUMBERS)),),
        reward=draw(ODD_FLOATS),
        reward_parts={"part": draw(ODD_FLOATS)},
    )
    group = TrajectoryGroup(
        group_id=draw(ODD_NUMBERS),
        prompt_tokens=np.full(draw(st.integers(0, 3)), draw(ODD_INTS), np.int32),
        trajectories=(answer,) * draw(st.integers(1, 3)),
        worker=draw(st.sampled_from(["", "w0", "evil", "evil", "evil"])),
    )
    return encode(group)


@st.composite
def bodies(draw: Any, topic: Topic[Any]) -> bytes:
    """Bytes with every kind of defect."""
    kind, sample = topic.message_type, SAMPLES[topic.message_type]
    how = draw(st.sampled_from(["random", "cut", "mutated", "other", "schema", "field", "msgpack", "huge", "odd"]))
    data = encode(sample)
    if how == "random":
        return bytes(draw(st.binary(max_size=100)))
    if how == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    if how == "mutated":
        mutated = bytearray(data)
        mutated[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(mutated)
    if how == "other":
        return encode(SAMPLES[draw(st.sampled_from(list(SAMPLES)))])
    if how == "schema":
        name, _, fields = unpackb(data)
        return packb((name, draw(ODD_NUMBERS), fields))
    if how == "field":
        field = draw(st.sampled_from([f.name for f in dataclasses.fields(kind)]))
        return tampered(kind, {field: draw(JSON_LIKE | ODD_FLOATS | ODD_INTS)})
    if how == "msgpack":
        return packb(draw(JSON_LIKE))
    if how == "huge":
        return data + bytes(100_000)
    return bytes(draw(trajectory_groups())) if topic is TRAJECTORIES else data[::-1]


@st.composite
def messages(draw: Any) -> tuple[Topic[Any], str, bytes]:
    topic = draw(st.sampled_from(ALL))
    return topic, draw(KEYS), draw(bodies(topic))


def is_the_learners(topic: Topic[Any], key: str, data: bytes) -> bool:
    """Return whether a learner could have written the message, or it takes the place of a prompt or of the learner's
    state; the server's permissions then keep it away."""
    if topic is PROMPTS and group_id_of(key) is not None:
        return True
    if topic in LEARNERS and topic.kind == "state" and not key:
        return True
    try:
        decode(data, topic.message_type)
    except OtherSchema:  # ends a reader
        return topic in LEARNERS
    except MessageError:
        return False
    return topic in LEARNERS


TICKETS = Tickets(b"of this run")


async def throw(
    bus: MemoryBus, hostile: list[tuple[Topic[Any], str, bytes]], *, is_lent: Callable[[int], bool]
) -> None:
    """is_lent: whether a group's prompt, and so its ticket, was delivered to the enemy"""
    for topic, key, data in hostile:
        group_id = group_id_of(key)
        if topic is TRAJECTORIES and group_id is not None and is_lent(group_id):
            key = TICKETS.key(group_id, worker="evil")
        if topic.kind == "state":
            bus._state(topic).put(key, data)
        else:
            bus._queue(topic).add(key, data)
        for _ in range(5):
            await asyncio.sleep(0)


async def run_among(hostile: list[tuple[Topic[Any], str, bytes]], directory: Path) -> tuple[Loop, MemoryBus]:
    """Run two steps; a third of the messages is on the bus before the start."""
    bus = MemoryBus(**(BUS_SIZES | {"max_message_bytes": MAX_MESSAGE_BYTES, "max_prompts": 1000}))
    validator = Validator(bus, validation=GroupValidation(vocabulary_size=VOCABULARY, context_tokens=1000))
    loop = Loop(bus, directory, steps=2, validator=validator, max_failed_in_a_row=1000, tickets=TICKETS)
    early = len(hostile) // 3
    await throw(bus, hostile[:early], is_lent=lambda group_id: group_id < loop.groups_per_batch)
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(bus, Engine())))
        group.create_task(loop.run_learner())
        await until(lambda: hasattr(loop, "learner"))
        await throw(bus, hostile[early:], is_lent=lambda group_id: loop.learner.table.is_published(group_id))
    return loop, bus


@pytest.mark.timeout(900 + CASES)
@settings(max_examples=max(1, CASES // MESSAGES), suppress_health_check=list(HealthCheck))
@given(hostile=st.lists(messages(), min_size=MESSAGES, max_size=MESSAGES))
def test_no_message_stops_a_run_or_is_trained_unless_it_can_be(hostile: list[tuple[Topic[Any], str, bytes]]) -> None:
    hostile = [message for message in hostile if not is_the_learners(*message)]
    with tempfile.TemporaryDirectory() as directory:
        loop, bus = asyncio.run(run_among(hostile, Path(directory)))
    assert loop.backend.steps == 2
    for micro_batch in [one for step in loop.backend.trained for one in step]:
        assert 0 <= micro_batch.tokens.min() <= micro_batch.tokens.max() < VOCABULARY
        assert np.isfinite(micro_batch.behavior_logprobs).all()
        assert np.isfinite(micro_batch.advantages).all()
        assert np.isfinite(micro_batch.loss_weights).all()
        assert 0 <= micro_batch.staleness.min() <= micro_batch.staleness.max() <= loop.max_staleness
    early = hostile[: len(hostile) // 3]  # in the log before any answer, so read before the last step
    assert bus.rejections.total >= len(
        {key for topic, key, _ in early if topic is TRAJECTORIES and group_id_of(key) is None}
    )


@settings(max_examples=max(1, CASES // 5))
@given(data=st.data())
def test_no_question_and_no_answer_stops_who_reads_it(data: st.DataObject) -> None:
    rejections = Rejections()
    line = Line(TRANSFERS, rejections)

    async def send(_: bytes) -> None: ...

    sample = encode(TransferRequest(engine="w0", group="g", num_ranks=1)) + encode(TransferOffer(problem="none"))
    body = data.draw(st.binary(max_size=60) | st.integers(0, len(sample)).map(lambda cut: sample[:cut]))
    line.add(body, send)
    answer_of(body, TRANSFERS, rejections)
    assert rejections.total >= 1  # no bytes are valid as both


def test_a_flood_of_one_kind_by_one_sender_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections()
    with caplog.at_level(logging.WARNING):
        news = [
            rejections.note("trajectories", f"group {number}: no", kind="impossible", sender="w1")
            for number in range(50)
        ]
        rejections.note("trajectories", "no", kind="impossible", sender="w2")
    assert news == [True] + [False] * 49
    assert rejections.total == 51
    assert len(caplog.records) == 2


def test_invented_senders_fill_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections()
    for number in range(5000):
        rejections.note("trajectories", "no", sender=str(number))
    assert rejections.total == 5000
    assert len(rejections.counts) == len(caplog.records) == 1001


async def test_junk_on_every_subject_of_a_real_server_changes_nothing(
    nats_server: EmbeddedServer, connect: Any, tmp_path: Path
) -> None:
    """From a connection with all rights; also on the subjects of services, leases and our own inboxes."""
    run = "junk"
    enemy, learners, workers = [await connect(nats_server, run=run, max_prompts=100) for _ in range(3)]
    loop = Loop(learners, tmp_path, steps=3, max_failed_in_a_row=1000, validator=Validator(learners))
    bodies = [b"", b"\xc1", b"\x93" * 3000, encode(SAMPLES[WeightVersion])[:-3], bytes(500_000)]
    subjects = [
        *(enemy._layout.prefix(topic) + key for topic in ALL for key in ("0", "4", "x", "=", "w0", "=FF", "99999")),
        enemy._layout.service(TRANSFERS),
        enemy._layout.freed("load-0", role="learner"),
        f"{workers._connection._inbox}.1",
        f"{learners._connection._inbox}.2",
        "$JS.ACK.asyncrl-junk-prompts.workers.1.1.1.1.1",
    ]

    async def throw_all() -> None:
        for subject in subjects:
            for body in bodies:
                await enemy._connection.send(subject, body, reply="")

    async with asyncio.TaskGroup() as group:
        await throw_all()
        group.create_task(run_worker(worker(workers, Engine())))
        group.create_task(loop.run_learner())
        await throw_all()
    assert loop.backend.steps == 3
    assert learners.rejections.total > 5
    assert workers.rejections.total > 5
