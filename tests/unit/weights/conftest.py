"""An engine that takes weights."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asyncrl.engines.inprocess import engine as inprocess
from tests.harness.engines import Model


@pytest.fixture
async def engine(old_model: Model) -> AsyncIterator[inprocess.InProcessEngine]:
    """An engine that samples from the old model as version 0:1."""
    options = inprocess.Options(threads=1)
    made = inprocess.InProcessEngine(old_model.folder, device="cpu", dtype="float32", version=(0, 1), options=options)
    await made.start()
    yield made
    await made.close()
