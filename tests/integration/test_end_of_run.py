"""Commands that read the bus of a run that is up end with it, even if it ends in the middle of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.adapters import registry
from asyncrl.adapters.bus_file import BUS_FILE, write_address
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.audit.shadow import Shadow
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.cli.main import main
from asyncrl.config import record
from asyncrl.config.run import RunConfig
from asyncrl.errors import NoSuchRun
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.os_process import process_space


class LiveRun:
    """A run that is up as far as its folder and its bus tell."""

    def __init__(self, directory: Path, server: EmbeddedServer) -> None:
        overrides = [f"run.directory={directory.parent}", f"run.name={directory.name}", "model.path=m", "data.path=d"]
        self.config: RunConfig = config.only_overrides(overrides)
        self.recorded, self._server = RecordedRun(directory), server
        directory.mkdir()
        history = History(directory / HISTORY_FILE, incarnation=0)
        settings = record.as_table(self.config)
        history.begin(step=0, kept=0, max_staleness=self.config.max_staleness, settings=settings, host=process_space())
        history.close()
        write_address(directory, url=server.url, token=server.token, worker_token="")
        asyncio.run(self._make_streams())

    async def _make_streams(self) -> None:
        await (await registry.connect(self.config, token="")).close()

    def end(self) -> None:
        (self.recorded.directory / BUS_FILE).unlink()
        self._server.stop()


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[LiveRun]:
    with EmbeddedServer(tmp_path / "bus", run="r") as server:
        yield LiveRun(tmp_path / "r", server)


def test_a_request_does_not_outlive_the_run(live_run: LiveRun) -> None:
    async def work(bus: Bus) -> None:
        assert await bus.depth(TRAJECTORIES) == 0
        live_run.end()
        await bus.depth(TRAJECTORIES)

    with pytest.raises(NoSuchRun, match="has ended meanwhile"):
        live_run.recorded.on_bus(live_run.config, work, token="")


def test_a_shadow_ends_with_the_run(live_run: LiveRun) -> None:
    async def work(bus: Bus) -> int:
        live_run.end()
        shadow = Shadow(live_run.recorded, live_run.recorded.directory / "shadows" / "s", overrides=[], most_lag=0)
        async with contextlib.aclosing(shadow.follow(bus)) as steps:
            return len([step async for step in steps])

    assert live_run.recorded.on_bus(live_run.config, work, token="") == 0


def test_a_shadow_of_a_run_that_is_over_is_refused(live_run: LiveRun, capsys: pytest.CaptureFixture[str]) -> None:
    live_run.end()
    assert main(["shadow", str(live_run.recorded.directory)]) == 2
    assert "start it while the run is up" in capsys.readouterr().err
