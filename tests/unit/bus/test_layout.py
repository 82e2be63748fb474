"""Names on the bus."""

from __future__ import annotations

import itertools

import pytest

from asyncrl.bus.jetstream.layout import Layout, is_removed, key_of, token
from asyncrl.errors import BusError
from asyncrl.messages.topics import ALL


@pytest.mark.parametrize("key", ["", "plain-key_1", "a.b c", "=", "==41", "ü", "*>"])
def test_a_key_survives_its_token(key: str) -> None:
    assert key_of(token(key)) == key
    assert set(token(key)) <= set("=-_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def test_too_long_key_is_refused() -> None:
    with pytest.raises(BusError, match="key"):
        token("k" * 300)


def test_streams_of_two_topics_never_share_a_name() -> None:
    layout = Layout(run="r", max_prompts=1, max_log_bytes=1, ack_seconds=1.0, storage="file")
    subjects = [layout.subject(topic, "k") for topic in ALL]
    assert len(set(subjects)) == len(ALL)
    assert all(not a.startswith(b + ".") for a, b in itertools.permutations(subjects, 2))


@pytest.mark.parametrize(
    ("headers", "removed"),
    [
        ({}, False),
        ({"Nats-TTL": "15s"}, False),
        ({"KV-Operation": "PURGE"}, True),
        ({"KV-Operation": "DEL"}, True),
        ({"Nats-Marker-Reason": "MaxAge"}, True),
    ],
)
def test_removal_markers_of_clients_and_of_the_server_are_recognised(headers: dict[str, str], removed: bool) -> None:
    assert is_removed(headers) is removed
