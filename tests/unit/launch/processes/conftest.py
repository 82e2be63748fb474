"""The process manager with fake processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from asyncrl.bus.adapter import BusServer
from asyncrl.launch.processes import child_process, process_manager, process_specs
from tests.harness.fleet import Launcher, Stage


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def one(launcher: Launcher, *overrides: str, gpus: int = 0, server: BusServer | None = None) -> Stage:
        monkeypatch.setattr(process_specs, "num_gpus", lambda: gpus)
        monkeypatch.setattr("asyncrl.launch.processes.gpus.num_gpus", lambda: gpus)
        made.append(Stage(launcher, *overrides, server=server))
        return made[-1]

    monkeypatch.setattr(child_process, "BACK_OFF_SECONDS", 0.0)
    monkeypatch.setattr(process_manager, "FINISH_SECONDS", 0.1)
    yield one
    for each in made:
        if not each.task.done():
            each.manager._over.set()
            await each.task
