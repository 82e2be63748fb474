"""Credentials of a bus: passwords, NKEYs and certificates. Errors name what failed in one line without secrets."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import PROGRESS
from tests.conftest import BUS_SIZES
from tests.harness.buses import progress
from tests.harness.roles import Server, connected, end, started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("nats") / "server")
    yield made
    made.close()


async def test_a_wrong_password_is_one_line_without_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("mine-learner:not-the-password")
    access = Credentials(credentials=str(tmp_path / "wrong"))
    with pytest.raises(ConfigError, match="refuses the token or password") as error:
        await JetStreamBus.connect(
            f"nats://127.0.0.1:{server.port}", run="mine", access=access, storage="file", **BUS_SIZES
        )
    assert "not-the-password" not in str(error.value)


@pytest.fixture
def nkey_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The url of a server, and the file with the seed of the only user that it knows."""
    nkeys = pytest.importorskip("nkeys")
    seed = _encoded_seed(bytes(range(32)))
    (tmp_path / "seed").write_bytes(seed)
    config = {
        "listen": "127.0.0.1:-1",
        "jetstream": {"store_dir": str(tmp_path / "store")},
        "authorization": {"users": [{"nkey": nkeys.from_seed(bytearray(seed)).public_key.decode()}]},
    }
    (tmp_path / "nats.conf").write_text(json.dumps(config))
    process, url = started(tmp_path / "nats.conf", tmp_path / "ports")
    yield url, tmp_path / "seed"
    end(process)


async def test_an_nkey_seed_opens_the_bus(nkey_server: tuple[str, Path]) -> None:
    url, seed = nkey_server
    access = Credentials(credentials=str(seed))
    bus = await JetStreamBus.connect(url, run="mine", access=access, storage="file", **BUS_SIZES)
    await bus.put(PROGRESS, progress(1))
    assert (await bus.states(PROGRESS))[""].step == 1
    await bus.close()


def _encoded_seed(raw: bytes) -> bytes:
    """Encode a user's NKEY seed: prefix bytes for "SU", the key, CRC-16/XMODEM, in base32."""
    data = bytes([(18 << 3) | ((20 << 3) >> 5), ((20 << 3) & 31) << 3]) + raw
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).rstrip(b"=")


@pytest.mark.slow
async def test_tls_with_the_right_authority_opens_the_bus_and_without_it_does_not(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = map(str, certificate)
    server = Server(
        tmp_path / "server", "--tls-certificate", cert, "--tls-key", key, "--tls-client-ca", cert
    )  # the client shows the same certificate
    try:
        async with connected(server, "learner", tls_ca=cert, tls_certificate=cert, tls_key=key) as bus:
            await bus.put(PROGRESS, progress(1))
        with pytest.raises(ConfigError, match="bus.url nats://127.0.0.1"):
            async with asyncio.timeout(60), connected(server, "learner", connect_seconds=2.0):
                pass
    finally:
        server.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("hunter2", "must hold one line"), ("a:b\nc:d", "must hold one line"), (":x", "one line")],
)
def test_a_credentials_file_that_is_none_is_named_and_not_quoted(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "rollout-worker"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        Credentials(role="rollout-worker", credentials=f"{tmp_path}/{{role}}").options()
    assert "bus.credentials" in str(error.value)
    assert "hunter2" not in str(error.value)


async def test_an_address_that_is_none_is_not_quoted_with_its_password() -> None:
    connection = Connection("nats://user:hunter2#x@127.0.0.1:1")
    with pytest.raises(ConfigError) as error:
        await connection.open("nats://user:hunter2#x@127.0.0.1:1", options={}, inbox="_INBOX.x.learner", seconds=2)
    assert "hunter2" not in str(error.value)
    await connection.close()
