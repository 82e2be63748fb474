"""Fixtures: a tiny model, a fake server, and engines that are attached to one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import test_utils

from tests.harness.engines import Model
from tests.unit.engines.sglang.attached import Attach, attaching
from tests.unit.engines.sglang.fake_server import FakeServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
async def fake(model: Model) -> AsyncIterator[tuple[FakeServer, str]]:
    """A server of this model, and its URL."""
    server = FakeServer()
    server.model_path = str(model.folder)
    async with test_utils.TestServer(server.application) as running:
        yield server, str(running.make_url("")).rstrip("/")


@pytest.fixture
async def attach(model: Model, tmp_path: Path) -> AsyncIterator[Attach]:
    async with attaching(model, tmp_path) as attach:
        yield attach
