"""What two observations of a stream tell about its losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.bus.jetstream.errors import stream_of
from asyncrl.bus.jetstream.stream_state import StreamState, altered, lost

BEFORE = StreamState("monday", {"num_replicas": 1}, first=11, last=20, messages=10)
AGED = {"config": {"max_age": 100 * 10**9}, "began": 50.0, "time": 60.0}


@pytest.mark.parametrize(
    ("kind", "trimmed", "changes", "expected"),
    [
        ("log", 0, {}, ""),
        ("log", 0, {"last": 25, "messages": 15}, ""),
        ("log", 15, {"first": 16, "messages": 5}, ""),  # trimmed by us
        ("log", 20, {"first": 21, "messages": 0}, ""),
        ("log", 15, {"first": 17, "messages": 4}, "lost its entries up to 16"),
        ("log", 0, {"first": 21, "messages": 0}, "lost its entries up to 20"),
        ("log", 0, {"messages": 8}, "lost 2 of its entries"),
        ("log", 0, {"messages": 8, "config": {"num_replicas": 3}}, ""),  # a cluster may skip sequences
        ("work", 0, {"first": 21, "messages": 0}, ""),  # acked
        ("", 0, {"first": 21, "messages": 0}, ""),  # expired
        ("state", 0, {"first": 14, "last": 23}, ""),
        ("state", 0, {"messages": 7}, "lost 3 of its 10 states"),
        ("log", 0, {"last": 19, "messages": 9}, "went back from entry 20 to 19"),
        ("", 0, {"created": "tuesday", "last": 30}, "was deleted and recreated"),
        ("aged", 0, AGED | {"first": 21, "messages": 0}, "lost its entries up to 20"),
        ("aged", 0, AGED | {"messages": 9}, "lost 1 of its entries"),
        ("aged", 0, AGED | {"first": 21, "messages": 0, "time": 150.0}, ""),  # the entries may have expired
        ("aged", 0, AGED | {"first": 21, "messages": 0, "time": 0.0}, ""),  # a server that does not report its time
    ],
)
def test_what_somebody_else_took_is_told_from_what_left_by_itself(
    kind: str, trimmed: int, changes: dict[str, Any], expected: str
) -> None:
    before = replace(BEFORE, began=changes.get("began", 0.0))
    assert lost(before, replace(before, **changes), kind=kind, trimmed=trimmed) == expected


def test_times_are_read_as_servers_write_them() -> None:
    def seen(ts: Any) -> StreamState:
        return StreamState.of({"created": "", "config": {}, "ts": ts, "state": {"first_ts": "0001-01-01T00:00:00Z"}})

    assert seen("1970-01-01T00:01:40.123456789Z").time == pytest.approx(100.123456)
    assert seen("1970-01-01T01:01:40+01:00").time == 100.0
    assert [seen(other).time for other in (None, "", "x", 3)] == [0.0] * 4
    assert seen("").began == 0.0


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"max_age": 0, "discard": "new"}, ""),
        ({"max_age": 0, "discard": "new", "allow_msg_ttl": False, "max_msgs": -1}, ""),  # some servers report more
        ({"discard": "new", "metadata": {"_nats.ver": "2.12"}, "description": "ours"}, ""),
        ({"max_age": 5, "discard": "old"}, "was altered: discard new -> old, max_age 0 -> 5"),
        ({}, "was altered: discard new -> unset"),
    ],
)
def test_settings_that_somebody_changed_are_named(now: dict[str, Any], expected: str) -> None:
    assert altered(StreamState("", {"max_age": 0, "discard": "new"}), StreamState("", now)) == expected


@pytest.mark.parametrize(
    ("subject", "headers", "expected"),
    [
        ("asyncrl.r.prompts.1", {"Nats-Expected-Stream": "asyncrl-r-prompts"}, "asyncrl-r-prompts"),
        ("$JS.API.STREAM.INFO.one", {}, "one"),
        ("$JS.API.STREAM.MSG.GET.one", {}, "one"),
        ("$JS.API.DIRECT.GET.one.$KV.one.key", {}, "one"),
        ("$JS.API.CONSUMER.CREATE.one.reader-1", {}, "one"),
        ("$JS.API.INFO", {}, ""),
        ("$JS.ACK.one.workers.1.2.3.4.5", {}, ""),
    ],
)
def test_the_stream_of_a_request_is_known(subject: str, headers: dict[str, str], expected: str) -> None:
    assert stream_of(subject, headers) == expected
