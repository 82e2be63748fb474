"""The server loses data: streams disappear, or its disk goes back in time. The run ends in one line that names the
loss, and the resumed run rebuilds it.

Real processes on a real nats-server whose store the test takes away. No group is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.nats_server.server import EmbeddedServer
from tests.chaos.storm import Storm
from tests.chaos.test_trouble import assert_is_clean, log_of, storm_on
from tests.harness.forked import ForkServer
from tests.harness.run_process import within

pytestmark = pytest.mark.slow

REMEDY = "`asyncrl run FILE --resume` makes it again"


async def resumed(storm: Storm, *, runs: int) -> None:
    """Wait until the run has ended, and was resumed and has trained. ``runs``: starts of `asyncrl run` before."""
    async with within("the run has ended and is resumed"):
        while storm.runs == runs:
            await asyncio.sleep(0.05)
    before = storm.seen.step
    await storm.until(lambda: storm.seen.step[0] > before[0] and storm.seen.step[1] > 0, "the resumed run trains")


async def test_run_on_a_server_whose_disk_went_back_ends_and_resume_loses_no_group_and_trains_none_twice(
    own_server: EmbeddedServer, tmp_path: Path, forks: ForkServer
) -> None:
    """As after a power loss: the store is some steps old, the checkpoints are current."""
    store, image = own_server.directory / "jetstream", tmp_path / "image"
    storm = storm_on(own_server, tmp_path, forks=forks)
    async with storm.up() as seen:
        await asyncio.to_thread(shutil.copytree, store, image)
        before, runs = seen.step, storm.runs
        await storm.until(lambda: seen.step[1] > before[1] + 5, "the run goes on")
        own_server.stop()
        shutil.rmtree(store)
        image.rename(store)
        own_server.start()
        await resumed(storm, runs=runs)
        assert REMEDY in storm.output
        assert log_of(storm, "learner").count("the bus lost what it had of the trajectory log") == 1
    assert_is_clean(await asyncio.to_thread(storm.audit))


@contextlib.asynccontextmanager
async def admin(server: EmbeddedServer) -> AsyncIterator[Connection]:
    """Connect with the server's own password."""
    connection = Connection(server.url)
    try:
        await connection.open(
            server.url, options={"token": server.token}, inbox="_INBOX.admin", answers="admin", seconds=20
        )
        yield connection
    finally:
        await connection.close()


async def test_run_ends_when_its_streams_are_deleted_and_resume_rebuilds_them(
    own_server: EmbeddedServer, tmp_path: Path, forks: ForkServer
) -> None:
    """All of them, with the weights: tests/integration/bus deletes each of them alone."""
    storm = storm_on(own_server, tmp_path, 'weights.channel="objects"', forks=forks)
    async with admin(own_server) as api, storm.up():
        async with within("weights on the bus"):
            streams: list[str] = []
            while not any(name.startswith("OBJ_") for name in streams):  # created with the first weights
                streams = (await api.api("STREAM.NAMES"))["streams"]
                await asyncio.sleep(0.05)
        runs, behind = storm.runs, len(storm.output)
        await asyncio.gather(*(api.api(f"STREAM.DELETE.{stream}") for stream in streams))
        await resumed(storm, runs=runs)
        assert storm.output[behind:].count(REMEDY) == 1
    assert_is_clean(await asyncio.to_thread(storm.audit))
