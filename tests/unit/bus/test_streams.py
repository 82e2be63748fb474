"""Streams: their names, and what is refused of streams that are there."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
from typing import Any

import pytest

from asyncrl.bus.jetstream.connection import NO_STREAM, Connection, Refused
from asyncrl.bus.jetstream.layout import Layout, is_removed, key_of, token
from asyncrl.bus.jetstream.streams import Streams, leaders_message
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config.bus import BusSection
from asyncrl.errors import BusError, ConfigError, NoSuchRun
from asyncrl.messages.topics import ALL, PROMPTS, TRAJECTORIES

PAGE = 1024


class ManyRuns(Connection):
    """A server with two streams for each of 1,000 other runs. It lists as many names per reply as nats-server does."""

    async def api(self, verb: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if verb != "STREAM.NAMES":
            raise Refused(verb, {"err_code": NO_STREAM, "description": "stream not found"})
        names = [f"asyncrl-r{number:03}-{topic}" for number in range(1000) for topic in ("events", "prompts")]
        return {"total": len(names), "streams": names[body["offset"] :][:PAGE]}


async def test_missing_run_is_refused_with_the_list_of_runs() -> None:
    layout = Layout(run="nowhere", max_prompts=8, max_log_bytes=2**20, ack_seconds=1.0, storage="memory")
    with pytest.raises(NoSuchRun) as refused:
        await Streams(ManyRuns("nats://127.0.0.1:1"), layout, role="observer").open((PROMPTS,))
    runs = str(refused.value).rpartition(": ")[2].split(", ")
    assert runs == [f"r{number:03}" for number in range(1000)]


class OtherSettings(Connection):
    """A server whose streams of this run have settings that no update can change."""

    async def api(self, verb: str, body: Any = None, **_: Any) -> dict[str, Any]:
        raise Refused(verb, {"err_code": 10052, "description": "can not change storage type"})


async def test_streams_with_other_settings_are_refused_with_keys_of_the_run_file() -> None:
    layout = Layout(run="r", max_prompts=8, max_log_bytes=2**20, ack_seconds=1.0, storage="memory")
    with pytest.raises(ConfigError, match="exists with other settings") as refused:
        await Streams(OtherSettings("nats://127.0.0.1:1"), layout, role="learner").open((PROMPTS,))
    keys = re.findall(r"bus\.(\w+)", str(refused.value))
    assert keys and set(keys) <= {field.name for field in dataclasses.fields(BusSection)}


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


async def test_headers_that_are_no_text_are_read(nats_server: EmbeddedServer, connect: Any) -> None:
    """Any client may write them; a reader that raises could never pass over the message."""
    bus = await connect(nats_server)
    stream = await bus._stream(TRAJECTORIES)
    subject = bus._layout.subject(TRAJECTORIES, "w0/junk")
    reader, writer = await asyncio.open_connection(*nats_server.url.removeprefix("nats://").split(":"))
    await reader.readline()
    headers, body = b"NATS/1.0\r\nX: \xff\r\n\r\n", b"{}"
    sizes = f"{len(headers)} {len(headers + body)}".encode()
    login = json.dumps({"auth_token": nats_server.token, "headers": True, "verbose": False}).encode()
    message = b"HPUB %b stored %b\r\n%b%b\r\n" % (subject.encode(), sizes, headers, body)
    writer.write(b"CONNECT %b\r\nSUB stored 1\r\n" % login + message)
    while not (await reader.readline()).startswith(b"MSG stored"):  # the stream's ack: it has the message
        pass
    writer.close()
    stored = await leaders_message(bus._connection, stream, {"last_by_subj": subject})
    assert stored is not None and stored.data == body
