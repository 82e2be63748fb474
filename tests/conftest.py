"""Fixtures: a real nats-server, and a bus of each kind behind one name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import blockbuster
import hypothesis
import pytest

from asyncrl.bus.jetstream import JetStreamBus
from asyncrl.bus.memory import MemoryBus
from asyncrl.bus.server import EmbeddedServer
from asyncrl.protocols import Bus

# A shared machine is slow at times, and a test run leaves no files behind. The same cases every time: whether a change
# lands is no matter of luck. ASYNCRL_EXPLORE=1 draws others, for a night.
hypothesis.settings.register_profile(
    "asyncrl", deadline=None, database=None, max_examples=100, derandomize=not os.environ.get("ASYNCRL_EXPLORE")
)
hypothesis.settings.load_profile("asyncrl")

BUS_SIZES = {"max_prompts": 8, "max_log_bytes": 4 * 2**20, "ack_seconds": 30.0}
MAX_MESSAGE_BYTES = 2**20

BusFactory = Callable[..., Awaitable[Bus]]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A real server for the whole session; tests share it under different run names."""
    with EmbeddedServer(tmp_path_factory.mktemp("nats"), max_message_bytes=MAX_MESSAGE_BYTES) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may stop and start."""
    with EmbeddedServer(tmp_path / "bus", max_message_bytes=MAX_MESSAGE_BYTES) as server:
        yield server


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[JetStreamBus]]]:
    """``await connect(server, run=..., ack_seconds=...)``: a JetStream bus that is closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(server: EmbeddedServer, *, run: str = "", **sizes: Any) -> JetStreamBus:
            options = {"token": server.token, "storage": "file"} | BUS_SIZES | sizes
            bus = await JetStreamBus.connect(server.url, run=run or uuid.uuid4().hex[:8], **options)
            stack.push_async_callback(bus.close)
            return bus

        yield open_one


@pytest.fixture(params=["memory", "jetstream"])
async def bus_factory(
    request: pytest.FixtureRequest,
    nats_server: EmbeddedServer,
    connect: Callable[..., Awaitable[JetStreamBus]],
) -> AsyncIterator[BusFactory]:
    """``await bus_factory(ack_seconds=...)``: one more connection to the same run. Sizes count at the first call."""
    if request.param == "memory":
        shared: list[MemoryBus] = []

        async def open_memory(**sizes: Any) -> Bus:
            if not shared:
                shared.append(MemoryBus(**(BUS_SIZES | {"max_message_bytes": MAX_MESSAGE_BYTES} | sizes)))
            return shared[0]

        yield open_memory
    else:
        run = uuid.uuid4().hex[:8]

        async def open_jetstream(**sizes: Any) -> Bus:
            return await connect(nats_server, run=run, **sizes)

        yield open_jetstream


@pytest.fixture
async def bus(bus_factory: BusFactory) -> Bus:
    """An empty bus of each kind."""
    return await bus_factory()


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster, tests/ray_fixtures.py, for the whole session: it takes seconds to start."""
    pytest.importorskip("ray")
    from tests.ray_fixtures import TwoNodes

    made = TwoNodes()
    yield made
    made.end()


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """A call that blocks the event loop fails the test."""
    with blockbuster.blockbuster_ctx(scanned_modules=["asyncrl.bus"]):
        yield


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(
        [*command.split(), "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True, capture_output=True
    )
    return folder / "cert.pem", folder / "key.pem"
