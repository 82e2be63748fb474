"""Fixtures of all tests: a real nats-server, buses of every kind behind one name, and shared models and servers.

tests/conftest.py loads them, except in a process that only hands out tests to others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.data import demo_task
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import contract_adapters, forked_sglang
from tests.harness.engines import Model
from tests.harness.forked import MODELS, ForkServer

BusFactory = Callable[..., Awaitable[Bus]]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A real server for the whole session; tests share it under different run names.

    It syncs once a minute, because no test cuts its power. At each sync every stream checks whether it must write,
    including the streams of hundreds of finished runs. Once a second, this check would cost a twentieth of a core.
    """
    folder = tmp_path_factory.mktemp("nats")
    with EmbeddedServer(folder, max_message_bytes=MAX_MESSAGE_BYTES, sync_seconds=60.0) as server:
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


@pytest.fixture(params=["memory", "jetstream", *contract_adapters.extra("bus")])
async def bus_factory(
    request: pytest.FixtureRequest,
    nats_server: EmbeddedServer,
    connect: Callable[..., Awaitable[JetStreamBus]],
) -> AsyncIterator[BusFactory]:
    """``await bus_factory(ack_seconds=...)``: one more connection to the same run. Sizes only matter in the first
    call."""
    if request.param == "memory":
        shared: list[MemoryBus] = []

        async def open_memory(**sizes: Any) -> Bus:
            if not shared:
                shared.append(MemoryBus(**(BUS_SIZES | {"max_message_bytes": MAX_MESSAGE_BYTES} | sizes)))
            return shared[0]

        yield open_memory
    elif contract_adapters.is_extra(request.param):
        opened: list[Bus] = []

        async def open_extra(**sizes: Any) -> Bus:
            if not opened or contract_adapters.load(request.param).is_shared:
                all_sizes = BUS_SIZES | {"max_message_bytes": MAX_MESSAGE_BYTES} | sizes
                opened.append(await contract_adapters.open_bus(request.param, **all_sizes))
            return opened[-1]

        yield open_extra
        for bus in opened:
            await bus.close()
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
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts the processes of runs by fork, which saves each of them the seconds that importing torch takes.

    All xdist processes share one server, because its own imports take 8 s of CPU. It ends with their parent.
    """
    tiny = ("tests.chaos.metered_net", "tests.chaos.clocked_backend", "tests.harness.tiny.reward")
    folder, owner = of_all_workers(tmp_path_factory, "forks")
    server = ForkServer(folder, (*MODELS, *tiny, "benchmarks.gpu.machines_rank"), owner=owner)
    server.connect().close()  # a run that is given this server can fork as soon as it starts
    yield server
    server.close()


@pytest.fixture(scope="session")
def sglang_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Starts SGLang servers by fork (tests/harness/forked_sglang.py), for all xdist processes."""
    folder, owner = of_all_workers(tmp_path_factory, "sglang-forks")
    server = forked_sglang.start(folder, owner=owner)
    yield server
    server.close()


def of_all_workers(tmp_path_factory: pytest.TempPathFactory, name: str) -> tuple[Path, int]:
    """Return the folder and the owner of a ForkServer that all xdist processes share, if there are any."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return tmp_path_factory.getbasetemp().parent / name, os.getppid()
    return tmp_path_factory.mktemp(name), 0


@pytest.fixture(scope="session")
def old_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model that `sglang_server` starts with."""
    return Model(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="session")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Other weights of the same shape."""
    return Model(tmp_path_factory.mktemp("new"), seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_server(
    old_model: Model, tmp_path_factory: pytest.TempPathFactory, sglang_forks: ForkServer
) -> AsyncIterator[SGLangEngine]:
    """One SGLang server for all tests of the xdist group "sglang"."""
    engine = SGLangEngine(
        old_model.folder,
        device="cpu",
        dtype="float32",
        version=(0, 0),
        options=Options(server_arguments={"max-total-tokens": 20_000}),
        log_path=tmp_path_factory.mktemp("sglang") / "server.log",
    )
    with forked_sglang.forking(sglang_forks):
        await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def old_sglang_server(sglang_server: SGLangEngine, old_model: Model) -> SGLangEngine:
    """It samples from the old model, whatever an earlier test has loaded."""
    await sglang_server.load(old_model.version(1))
    return sglang_server


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's model and prompts."""
    folder = tmp_path_factory.mktemp("demo")
    demo_task.write(folder)
    return folder


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster (tests/harness/ray.py) for the whole session, because starting it takes seconds."""
    pytest.importorskip("ray")
    from tests.harness.ray import TwoNodes

    made = TwoNodes()
    yield made
    made.end()


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """Fail the test if a call blocks the event loop."""
    import blockbuster

    with blockbuster.blockbuster_ctx(scanned_modules=["asyncrl.bus"]):
        yield


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
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
