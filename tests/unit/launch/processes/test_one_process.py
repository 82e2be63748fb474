"""What a run in one process does before it has a bus; whole runs are in tests/integration/test_memory_run.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.errors import ConfigError
from asyncrl.launch.processes.one_process import run_in_one_process
from tests import ROOT


async def test_sets_the_environment_of_the_weight_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it uses a GPU: NCCL reads its settings once."""
    run = config.load(ROOT / "examples" / "demo.toml", ["weights.channel=nccl", f"run.directory={tmp_path}"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("NCCL_CUMEM_ENABLE", None)
    found: list[str | None] = []

    async def no_bus(run: config.RunConfig) -> Bus:
        found.append(os.environ.get("NCCL_CUMEM_ENABLE"))
        raise ConfigError("no bus")

    monkeypatch.setattr(registry, "own_bus", no_bus)
    with pytest.raises(ConfigError, match="no bus"):
        await run_in_one_process(run, resume=False, owns_process=False)
    assert found == ["0"]
