"""A started engine of every adapter, and a weight channel over files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from asyncrl.config import EngineSection
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.port import Engine
from asyncrl.engines.sglang import engine as sglang
from asyncrl.weights.files import FilesChannel
from tests.harness import contract_adapters
from tests.harness.engines import Model, start_inprocess

SERVER = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.xdist_group("sglang")]
MODEL_CHARACTERS = "0123456789"
SAMPLERS = ["inprocess", *contract_adapters.extra("engine"), pytest.param("sglang", marks=SERVER)]
ADAPTERS = [*SAMPLERS, pytest.param("sglang-stream", marks=SERVER)]
"""Also a server whose answer is read as a stream. It samples the same way."""


@pytest.fixture
def old(old_model: Model) -> Model:
    return old_model


@pytest.fixture
def new(new_model: Model) -> Model:
    return new_model


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> tuple[str, sglang.SGLangEngine | None]:
    """The adapter's name, and the server if it needs one."""
    needs_server = request.param.startswith("sglang")
    return request.param, request.getfixturevalue("sglang_server") if needs_server else None


@pytest_asyncio.fixture(loop_scope="session")
async def engine(adapter: tuple[str, sglang.SGLangEngine | None], old: Model, tmp_path: Path) -> AsyncIterator[Engine]:
    """A started engine that samples from the old model as version 0:1."""
    name, server = adapter
    if contract_adapters.is_extra(name):
        run = contract_adapters.run_of(model=old.folder, directory=tmp_path, engine=EngineSection(kind=name))
        built = contract_adapters.load(name).build(run, name="w0")
        await built.start()
        await built.load(old.version(1))
        yield built
        await built.close()
    elif server is None:
        made = await start_inprocess(old)
        yield made
        await made.close()
    elif name == "sglang":
        await server.load(old.version(1))
        yield server
    else:
        options = sglang.Options(url=server.url, version_source="stream")
        attached = sglang.SGLangEngine(
            old.folder,
            device="cpu",
            dtype="float32",
            version=(0, 0),
            options=options,
            log_path=tmp_path / "unused.log",
        )
        await attached.start()
        await attached.load(old.version(1))
        yield attached
        await attached.close()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters=MODEL_CHARACTERS)


@pytest.fixture
def files_channel(tmp_path: Path, model_path: Path) -> FilesChannel:
    return FilesChannel(tmp_path / "weights", keep=2, model_path=model_path)
