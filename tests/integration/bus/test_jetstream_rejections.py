"""Connections that a real server refuses, or that get no answer: one readable line for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import ConfigError

SIZES: dict[str, Any] = {"max_prompts": 8, "max_log_bytes": 2**20, "ack_seconds": 30.0, "storage": "file"}


async def refused(url: str, *, token: str = "", seconds: float = 30.0, **sizes: Any) -> str:
    """``seconds``: how long to look for a server"""
    with pytest.raises(ConfigError) as error:
        await JetStreamBus.connect(url, run="r", token=token, connect_seconds=seconds, **(SIZES | sizes))
    assert "\n" not in str(error.value)
    return str(error.value)


async def test_unreachable_url_is_a_config_error(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        url = server.url
    message = await refused(url, seconds=0.5)
    assert message.startswith(f"bus.url {url}: no response (")
    assert message.endswith("start `nats-server -js` there or leave bus.url empty")


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_wrong_token_is_a_config_error(nats_server: EmbeddedServer, token: str) -> None:
    assert "ASYNCRL_BUS_TOKEN" in await refused(nats_server.url, token=token)


async def test_a_token_in_the_url_is_not_repeated(nats_server: EmbeddedServer) -> None:
    message = await refused(nats_server.url.replace("nats://", "nats://secret@"))
    assert "secret" not in message
    assert nats_server.url in message


@pytest.mark.parametrize("url", ["nats://", "nats://127.0.0.1:notaport", "nats://no.such.host.invalid:4222"])
async def test_a_bad_url_is_a_config_error(url: str) -> None:
    assert (await refused(url, seconds=0.5)).startswith(f"bus.url {url}: ")


@pytest.mark.parametrize("url", ["nats://127.0.0.1:1,127.0.0.1:2", "nats://127.0.0.1:99999"])
async def test_invalid_address_is_refused_with_an_example(url: str) -> None:
    assert "not an address; write nats://HOST:PORT, for a cluster nats://A:PORT,nats://B:PORT" in await refused(url)


class WithoutJetStream(EmbeddedServer):
    def _write_config(self) -> Path:
        path = super()._write_config()
        config = json.loads(path.read_text())
        del config["jetstream"]
        path.write_text(json.dumps(config))
        return path


async def test_a_server_without_jetstream_is_a_config_error(tmp_path: Path) -> None:
    with WithoutJetStream(tmp_path) as server:
        message = await refused(server.url, token=server.token)
    assert "JetStream is off there" in message


async def test_a_log_larger_than_the_servers_disk_is_a_config_error(own_server: EmbeddedServer) -> None:
    message = await refused(own_server.url, token=own_server.token, max_log_bytes=2**60)
    assert "bus.max_log_bytes" in message
