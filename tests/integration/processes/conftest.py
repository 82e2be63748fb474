"""Starts the processes of runs whose learner is Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.forked import MEGATRON, MODELS, ForkServer


@pytest.fixture(scope="package")
def megatron_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For the xdist group "learner-ranks"."""
    server = ForkServer(tmp_path_factory.mktemp("megatron-forks"), (*MODELS, *MEGATRON))
    server.connect().close()
    yield server
    server.close()
