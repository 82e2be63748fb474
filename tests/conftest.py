"""Fixtures: a real nats-server, buses of every kind behind one name, and shared models and servers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import torch

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.data import demo_task
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from tests.harness import contract_adapters, forked_sglang
from tests.harness.collected import Collected
from tests.harness.engines import Model
from tests.harness.forked import MODELS, ForkServer

# A shared machine is sometimes slow, so there are no deadlines, and a test run leaves no files behind. Every run uses
# the same cases, so that landing a change does not depend on luck. ASYNCRL_EXPLORE=1 draws other and more cases, for
# nightly runs.
explores = bool(os.environ.get("ASYNCRL_EXPLORE"))
hypothesis.settings.register_profile(
    "asyncrl", deadline=None, database=None, max_examples=200 if explores else 30, derandomize=not explores
)
hypothesis.settings.load_profile("asyncrl")

BUS_SIZES = {"max_prompts": 8, "max_log_bytes": 4 * 2**20, "ack_seconds": 30.0}
MAX_MESSAGE_BYTES = 2**20
SGLANG_MODELS = {"glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
"""Files of ``sglang.srt.models`` that an SGLang server of the tests may need."""

BusFactory = Callable[..., Awaitable[Bus]]

KINDS = {
    "system": (
        "tests/chaos",
        "tests/integration/processes",
        "tests/integration/ray",
        "tests/integration/cluster",
        "tests/integration/test_whole_system.py",
    ),
    "acceptance": ("tests/integration/learning",),
    "integration": ("tests/integration",),
    "unit": ("tests/unit", "tests/actors", "tests/contracts", "tests/oracles", "benchmarks/tests"),
    "docs": ("tests/docs",),
}
"""The marker that each test has by its place; the first that fits."""


def pytest_configure() -> None:
    """Let SGLang servers import only the models under test instead of all 250. This saves 3 s of CPU per rank.

    And let `asyncrl` be found as in an activated environment, so that messages name it so wherever tests run.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if (sglang := importlib.util.find_spec("sglang")) is not None and sglang.origin is not None:
        models = {path.stem for path in (Path(sglang.origin).parent / "srt" / "models").glob("*.py")}
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(models - SGLANG_MODELS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork pytest-xdist's processes from one that has collected the tests. This saves 12 s of CPU per process."""
    collected = Collected(config.invocation_params.args)
    config.add_cleanup(collected.close)
    for spec in specs:
        if spec.popen:
            spec.python = collected.python


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for `-n N --dist loadgroup --no-loadscope-reorder`: longest first, so that all workers end
    together.

    Slow tests with a group share a server, keep one worker busy for minutes, and start first. Other slow tests are
    distributed one by one, all remaining tests by file.
    """
    leave_to_the_night(config, items)
    mark_kinds(items)
    skip_without_gpus(items)
    if not config.getoption("loadgroup", False):  # set in xdist's processes, where "dist" is "no"
        return
    items.sort(key=_length)
    for item in items:
        if item.get_closest_marker("slow") is None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection: imports create little garbage, and searching it is a fifth of the import
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze the imported objects. This saves half a second of CPU for each backend that collects garbage when it
    closes."""
    importlib.import_module("transformers.models.auto.modeling_auto")  # as large as everything else, and needed soon
    let_loggers_propagate()
    gc.collect()
    gc.freeze()


def let_loggers_propagate() -> None:
    """Let the root logger hear torch's 55 loggers. Otherwise pytest gives each of them its handlers, six times a test:
    a millisecond and a half of CPU."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def _length(item: pytest.Item) -> int:
    """Return the sort key of a test; 0 is the longest."""
    if item.get_closest_marker("slow") is None:
        return 2
    return 0 if item.get_closest_marker("xdist_group") is not None else 1


def leave_to_the_night(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of nightly.txt, unless ASYNCRL_EXPLORE is set or tests are named on the command line.

    And actors on a bus in memory: they run on JetStream, and tests/contracts shows that the two are alike.
    """
    if explores or any("::" in word for word in config.invocation_params.args):
        return
    lines = (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    later = [line for line in lines if line and not line.startswith("#")]
    is_later = re.compile("|".join(map(pattern_of_line, later)))

    def is_left(item: pytest.Item) -> bool:
        buses = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_of_memory = item.nodeid.startswith("tests/actors/") and "memory" in buses
        return is_of_memory or is_later.match(re.sub(r"::Test\w+(?=::)", "", item.nodeid)) is not None

    config.hook.pytest_deselected(items=[item for item in items if is_left(item)])
    items[:] = [item for item in items if not is_left(item)]


def pattern_of_line(line: str) -> str:
    """Return the pattern of the tests that a line of nightly.txt names: a file, a test, or the beginning of a case of
    it. A test whose name only begins like a listed one is another test."""
    return re.escape(line) + ("" if "[" in line else r"(?![^:\[])")


def mark_kinds(items: list[pytest.Item]) -> None:
    """Mark every test as one of KINDS, so that ``-m`` can select them."""
    for item in items:
        kinds = [kind for kind, places in KINDS.items() if item.nodeid.startswith(places)]
        item.add_marker(kinds[0])


def skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skip tests without enough GPUs: ``@pytest.mark.gpu`` needs one CUDA device, ``@pytest.mark.gpu(2)`` needs two."""
    for item in items:
        if (mark := item.get_closest_marker("gpu")) is not None:
            needed = mark.args[0] if mark.args else 1
            if (found := torch.cuda.device_count()) < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))


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
