"""Starts the processes of runs whose learner is Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.forked import MEGATRON, MODELS, ForkServer


@pytest.fixture(scope="package")
def megatron_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """For the xdist group "learner-ranks"."""
    modules = (*MODELS, *MEGATRON, "benchmarks.gpu.machines_rank")
    server = ForkServer(tmp_path_factory.mktemp("megatron-forks"), modules)
    server.connect().close()
    yield server
    server.close()
