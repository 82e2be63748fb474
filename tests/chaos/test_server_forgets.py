"""The server loses data: streams disappear, or its disk goes back in time. The run notices, names and repairs the loss.

Real processes on a real nats-server whose store the test takes away. No group is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.nats_server.server import EmbeddedServer
from tests.chaos.test_trouble import assert_is_clean, log_of, storm_on
from tests.harness.forked import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NAMED_SECONDS = float(os.environ.get("ASYNCRL_NAMED_SECONDS", "120"))  # 10 on an idle machine
TIMES = int(os.environ.get("ASYNCRL_FORGETS", "1"))


async def test_a_server_whose_disk_goes_back_in_time_loses_no_group_and_trains_none_twice(
    own_server: EmbeddedServer, tmp_path: Path, forks: ForkServer
) -> None:
    """As after a power loss: the store is some steps old, the checkpoints are current."""
    store, image = own_server.directory / "jetstream", tmp_path / "image"
    storm = storm_on(own_server, tmp_path, forks=forks)
    async with storm.up() as seen:
        for number in range(TIMES):
            await asyncio.to_thread(shutil.copytree, store, image)
            before = seen.step
            await storm.until(lambda at=before: seen.step[1] > at[1] + 5, "the run goes on")
            own_server.stop()
            shutil.rmtree(store)
            image.rename(store)
            own_server.start()
            after = seen.step
            await storm.until(lambda at=after: seen.step[1] > at[1] + 5, "the run goes on with the older store")
            assert log_of(storm, "learner").count("the bus lost what it had of the trajectory log") == number + 1
        pids = storm.pids()
        assert {"learner", "w0", "w1", "w2"} <= pids.keys()
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


async def test_streams_that_somebody_deletes_purges_or_alters_are_named_and_made_again(
    own_server: EmbeddedServer, tmp_path: Path, forks: ForkServer
) -> None:
    storm = storm_on(own_server, tmp_path, 'weights.channel="objects"', forks=forks)

    def times_said(text: str) -> int:
        return log_of(storm, "learner").count(text)

    async def until_said(text: str, *, times: int = 1) -> None:
        """Wait until the learner reports it within NAMED_SECONDS and trains on."""
        came = asyncio.get_running_loop().time()
        await storm.until(lambda: times_said(text) >= times, text)
        assert asyncio.get_running_loop().time() - came < NAMED_SECONDS
        before = storm.seen.step
        await storm.until(lambda: storm.seen.step[1] > before[1] + 3, f"the run goes on after: {text}")

    async with admin(own_server) as api, storm.up():
        pids = storm.pids()
        streams: list[str] = []
        while not any(name.startswith("OBJ_") for name in streams):  # created with the first weights
            streams = (await api.api("STREAM.NAMES"))["streams"]
            await asyncio.sleep(0.05)
        for stream in streams if TIMES > 1 else [name for name in streams if name.endswith(("-actors", "-prompts"))]:
            await api.api(f"STREAM.DELETE.{stream}")
            await until_said(f"{stream} was deleted")
        log = next(stream for stream in streams if stream.endswith("-trajectories"))
        config = (await api.api(f"STREAM.INFO.{log}"))["config"]
        await api.api(f"STREAM.UPDATE.{log}", {**config, "subjects": ["elsewhere"], "max_bytes": 4096})
        await until_said(f"{log} was altered: max_bytes")
        before = times_said(f"{log} was deleted")
        await asyncio.gather(*(api.api(f"STREAM.DELETE.{stream}") for stream in streams))  # all at once
        await until_said(f"{log} was deleted", times=before + 1)
        assert storm.pids() == pids, "nobody had to start again"
        assert all(stream in storm.output for stream in streams)
    assert_is_clean(await asyncio.to_thread(storm.audit))


async def test_purged_heartbeats_and_events_are_named_and_nothing_else_comes_of_it(
    own_server: EmbeddedServer, tmp_path: Path, forks: ForkServer
) -> None:
    storm = storm_on(own_server, tmp_path, forks=forks)
    async with admin(own_server) as api, storm.up():
        pids = storm.pids()
        for suffix, said in (("-actors", "heartbeats were removed"), ("-events", "lost its entries up to")):
            (stream,) = [name for name in (await api.api("STREAM.NAMES"))["streams"] if name.endswith(suffix)]
            while said not in storm.output:  # a watcher that has not looked twice yet cannot miss anything
                await api.api(f"STREAM.PURGE.{stream}")
                came = asyncio.get_running_loop().time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(NAMED_SECONDS):
                        await storm.until(lambda word=said: word in storm.output, said)
            assert asyncio.get_running_loop().time() - came < NAMED_SECONDS
            before = storm.seen.step
            await storm.until(lambda at=before: storm.seen.step[1] > at[1] + 3, "the run goes on")
        assert storm.pids() == pids
    assert_is_clean(await asyncio.to_thread(storm.audit))
