"""Data written before schema 2 (tests/data/v1) is read under its present names, or refused in one line."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgpack
import pytest

from asyncrl.errors import MessageError
from asyncrl.messages import (
    SCHEMA,
    Heartbeat,
    Progress,
    PromptGroup,
    Quarantine,
    StepMetrics,
    TrajectoryGroup,
    WeightVersion,
    upgrade,
)
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.fleet import RunSettings
from asyncrl.messages.topics import ALL
from asyncrl.messages.weight_transfer import TransferOffer
from tests import ROOT
from tests.unit.messages.test_messages import SAMPLES, same

V1 = ROOT / "tests/data/v1"
TYPES = {topic.message_type.__name__: topic.message_type for topic in ALL}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (V1 / name).read_text().splitlines()]


OLD_SAMPLES = {line["type"]: base64.b64decode(line["data"]) for line in lines("samples.jsonl")}
"""Bytes of each message type's sample, as the old code encoded it."""


@pytest.mark.parametrize("name", sorted(OLD_SAMPLES.keys() - {"WeightVersion", "Heartbeat"}))
def test_a_recorded_message_of_schema_1_is_the_same_message_now(name: str) -> None:
    assert same(decode(OLD_SAMPLES[name], TYPES[name]), decode(encode(SAMPLES[TYPES[name]]), TYPES[name]))


def test_incarnations_and_failed_groups_keep_their_numbers() -> None:
    assert decode(OLD_SAMPLES["Quarantine"], Quarantine).incarnation == 1
    spans = decode(OLD_SAMPLES["TrajectoryGroup"], TrajectoryGroup).trajectories[0].version_spans
    assert [(span.incarnation, span.policy_version) for span in spans] == [(0, 6), (1, 7)]
    old = {"run_epoch": 3, "step": 7, "policy_version": 7, "groups_buried": 5}
    progress = decode(packed("Progress", 1, old), Progress)
    assert (progress.incarnation, progress.groups_failed, progress.groups_lost) == (3, 5, 5)


@pytest.mark.parametrize("kind", [Heartbeat, WeightVersion])
def test_heartbeats_and_weights_say_the_schema_of_their_process(kind: type) -> None:
    assert decode(OLD_SAMPLES[kind.__name__], kind).schema == 1
    assert decode(encode(SAMPLES[kind]), kind).schema == SCHEMA


def test_every_message_that_an_old_run_left_on_its_bus_is_read() -> None:
    types = {topic.name: topic.message_type for topic in ALL}
    found = [
        (line["topic"], decode(base64.b64decode(line["data"]), types[line["topic"]])) for line in lines("bus.jsonl")
    ]
    assert {"trajectories", "progress", "weights"} <= {topic for topic, _ in found}
    assert all(isinstance(message, types[topic]) for topic, message in found)


def test_an_engine_and_a_learner_of_two_schemas_exchange_no_weights() -> None:
    with pytest.raises(MessageError, match="schema 1 and this process reads schema 2; run the same version"):
        decode(packed("TransferOffer", 1, {}), TransferOffer)


def test_metrics_and_settings_inside_messages_have_their_present_names() -> None:
    left = {line["topic"]: base64.b64decode(line["data"]) for line in lines("bus.jsonl")}
    numbers = decode(left["metrics"], StepMetrics).numbers
    assert numbers["learner/incarnation"] == 1.0 and numbers["staleness/failed_groups"] == 2.0
    assert not [name for name in numbers if "run_epoch" in name or "buried" in name or "refused" in name]
    rollout = decode(left["settings"], RunSettings).sections["rollout"]
    assert rollout["partial_save_seconds"] == 1.0 and "salvage_seconds" not in rollout


def test_a_metric_of_one_worker_is_renamed_as_the_sum_over_workers_is() -> None:
    row = {"step": 3, "rollout/salvaged_tokens": 7.0, "rollout/w1/salvaged_tokens": 7.0, "rollout/w1/running": 1.0}
    new = {"step": 3, "rollout/resumed_tokens": 7.0, "rollout/w1/resumed_tokens": 7.0, "rollout/w1/running": 1.0}
    assert upgrade.metrics(row) == new == upgrade.metrics(new)


@pytest.mark.parametrize("schema", [0, 3, True, 1.0, "1", None])
def test_any_other_schema_is_refused(schema: object) -> None:
    fields = {"incarnation": 0, "step": 1, "policy_version": 1}
    with pytest.raises(MessageError, match="run the same version of asyncrl everywhere"):
        decode(packed("Progress", schema, fields), Progress)


def test_names_of_two_schemas_in_one_message_are_refused() -> None:
    with pytest.raises(MessageError, match="unknown fields"):
        decode(packed("Progress", SCHEMA, {"run_epoch": 0, "step": 1, "policy_version": 1}), Progress)
    both = {"run_epoch": 0, "incarnation": 2, "step": 1, "policy_version": 1}
    with pytest.raises(MessageError, match="has 'run_epoch' and 'incarnation'"):
        decode(packed("Progress", 1, both), Progress)


@pytest.mark.parametrize("fields", [[], 3, {"numbers": 3}, {"numbers": {"a": "b"}}, {"sections": {"rollout": 3}}])
@pytest.mark.parametrize("kind", [StepMetrics, RunSettings, PromptGroup])
def test_hostile_bytes_that_call_themselves_schema_1_are_refused(kind: type, fields: object) -> None:
    with pytest.raises(MessageError):
        decode(packed(kind.__name__, 1, {"unknown": 1} | fields if isinstance(fields, dict) else fields), kind)


def packed(name: str, schema: object, fields: object) -> bytes:
    data: bytes = msgpack.packb((name, schema, fields))
    return data
