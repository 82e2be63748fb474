"""The streams of a run, tested as far as possible without a server."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from asyncrl.bus.jetstream.connection import NO_STREAM, Connection, Refused
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.streams import Streams
from asyncrl.config.bus import BusSection
from asyncrl.errors import ConfigError, NoSuchRun
from asyncrl.messages.topics import PROMPTS

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
