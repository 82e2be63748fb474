"""Temporary faults that kill no process: processes wait, say so, and continue; nothing is lost or trained twice.

Real processes on a real nats-server. A connection is cut for CUT_SECONDS: a few by default; a nightly run sets
ASYNCRL_CUT_SECONDS=60.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.messages.topics import ACTORS, TRAJECTORIES
from asyncrl.policies.health.waits import SPACE_IN_LOG
from tests.chaos.run_files import CALM
from tests.chaos.storm import Storm
from tests.conftest import MAX_MESSAGE_BYTES
from tests.harness.buses import Proxy
from tests.harness.faults.injections import FILLER, fill, small_disk
from tests.harness.forked import ForkServer
from tests.harness.run_process import within

pytestmark = pytest.mark.slow

CUT_SECONDS = float(os.environ.get("ASYNCRL_CUT_SECONDS", "4"))
MESSAGE_BYTES = f"bus.max_message_bytes={MAX_MESSAGE_BYTES}"
PATIENT = "run.stall_seconds=600"
"""Keeps the launcher waiting, because its interventions are tested in test_liveness.py."""
LOST, BACK = "connection lost; all requests wait until it is back", "reconnected"


def assert_is_clean(audit: dict[str, Any]) -> None:
    assert not audit["problems"], audit["problems"]
    assert (audit["lost"], audit["duplicated"], audit["staleness_violations"]) == (0, 0, 0), audit
    assert audit["exit_code"] == 0
    assert audit["trained"] > 0


def storm_on(server: EmbeddedServer, folder: Path, *overrides: str, forks: ForkServer, url: str = "") -> Storm:
    """A run on the test's server. Its launcher, learner and own workers reach the server at ``url``."""
    address = f'bus.url="{url or server.url}"'
    return Storm(
        folder,
        seed=1,
        overrides=(address, MESSAGE_BYTES, PATIENT, CALM, *overrides),
        way=server.url,
        token=server.token,
        forks=forks,
    )


@contextlib.asynccontextmanager
async def worker(storm: Storm, forks: ForkServer, name: str, *, url: str) -> AsyncIterator[None]:
    """Start a worker that joins by itself. It must exit with code 0 when the run is finished."""
    words = ["rollout-worker", str(storm.run_file), "--name", name, "--set", f'bus.url="{url}"', "--set", MESSAGE_BYTES]
    environment = storm.environment
    process = forks.run(words, environment=environment, output=Path(os.devnull))
    try:
        yield
        assert await asyncio.to_thread(process.wait) == 0
    finally:
        process.kill()
        process.wait()


def log_of(storm: Storm, name: str) -> str:
    return (storm.run_directory / "logs" / f"{name}.log").read_text()


async def cut_off(proxy: Proxy) -> None:
    proxy.shut()
    await asyncio.sleep(CUT_SECONDS)
    await proxy.open()


@pytest.fixture
async def proxy(own_server: EmbeddedServer) -> AsyncIterator[Proxy]:
    async with Proxy(own_server.port) as proxy:
        yield proxy


# -- a connection that is cut ------------------------------------------------------------------------------------------


async def test_a_worker_continues_when_its_lost_connection_is_back(
    tmp_path: Path, own_server: EmbeddedServer, proxy: Proxy, forks: ForkServer
) -> None:
    storm = storm_on(own_server, tmp_path, "rollout.workers=1", forks=forks)
    async with worker(storm, forks, "x0", url=proxy.url), storm.up() as seen:
        await storm.until(lambda: seen.published.get("x0", 0) > 0, "x0 has joined")
        steps = seen.step[1]
        proxy.shut()
        await asyncio.sleep(CUT_SECONDS)
        await storm.until(lambda: seen.step[1] > steps, "a step: the other workers do not wait for it")
        await proxy.open()
        published = seen.published["x0"]
        await storm.until(lambda: seen.published["x0"] > published, "x0 works again")
    assert LOST in log_of(storm, "x0")
    assert BACK in log_of(storm, "x0")
    assert LOST not in log_of(storm, "learner")
    assert_is_clean(await asyncio.to_thread(storm.audit))


async def test_all_processes_continue_when_all_lost_connections_are_back(
    tmp_path: Path, own_server: EmbeddedServer, proxy: Proxy, forks: ForkServer
) -> None:
    storm = storm_on(own_server, tmp_path, forks=forks, url=proxy.url)
    async with storm.up() as seen:
        before = storm.pids()
        await cut_off(proxy)
        steps, published = seen.step[1], dict(seen.published)
        await storm.until(
            lambda: seen.step[1] > steps + 2 and all(seen.published[name] > published[name] for name in published),
            "all work again",
        )
        assert storm.pids() == before
    for name in ("learner", "w0", "w1", "w2"):
        assert LOST in log_of(storm, name)
        assert BACK in log_of(storm, name)
    assert_is_clean(await asyncio.to_thread(storm.audit))


# -- no space ----------------------------------------------------------------------------------------------------------


async def test_workers_report_a_full_log_and_continue_when_it_has_room(
    tmp_path: Path, own_server: EmbeddedServer, forks: ForkServer
) -> None:
    storm = storm_on(own_server, tmp_path, forks=forks)
    async with storm.up() as seen:
        before = storm.pids()
        async with full_log(storm) as fill:
            async with within("all workers wait for room"):
                while not await all_wait_for_room(storm):
                    await fill()
                    await asyncio.sleep(0.1)
            steps = seen.step[1]
        await storm.until(lambda: seen.step[1] > steps + 5, "all work again")
        assert storm.pids() == before
    assert_is_clean(await asyncio.to_thread(storm.audit))


@contextlib.asynccontextmanager
async def full_log(storm: Storm) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Make the trajectory stream reject messages; the yielded function fills it again.

    A process that opens the bus in the meantime gives the stream its configured limit back. On a busy machine some
    processes start that late.
    """
    bus: Any = storm.bus
    name = bus._layout.stream(TRAJECTORIES)
    found = (await bus._connection.api(f"STREAM.INFO.{name}"))["config"]

    def fill() -> Awaitable[object]:
        update: Awaitable[object] = bus._connection.api(f"STREAM.UPDATE.{name}", found | {"max_bytes": 1})
        return update

    await fill()
    try:
        yield fill
    finally:
        await bus._connection.api(f"STREAM.UPDATE.{name}", found)


async def all_wait_for_room(storm: Storm) -> bool:
    """Return whether all workers wait for room, according to their heartbeats."""
    assert storm.bus is not None
    beats = await storm.bus.states(ACTORS)
    waits = [beats[name].waits if name in beats else () for name in ("w0", "w1", "w2")]
    return all(any(wait.what == SPACE_IN_LOG for wait in its) for its in waits)


async def test_all_processes_wait_while_the_servers_disk_is_full_and_continue_when_it_has_room(
    tmp_path: Path, forks: ForkServer
) -> None:
    """The server's store is on a separate disk of 64 MiB. Only the server is restarted, and only once the disk has
    room."""
    stall_seconds = 8
    stalls = f"run.stall_seconds={stall_seconds}"
    storm = Storm(tmp_path, seed=1, overrides=("bus.max_log_bytes=8388608", MESSAGE_BYTES, stalls, CALM), forks=forks)
    with disk_of(storm.run_directory / "nats", megabytes=64) as disk:
        async with storm.up() as seen:
            before = storm.pids()
            fill(disk)
            await storm.until(lambda: "has stored nothing" in storm.output, "the watcher says so")
            await asyncio.sleep(stall_seconds)
            assert storm.pids() == before
            (disk / FILLER).unlink()
            steps = seen.step[1]
            await storm.until(lambda: seen.step[1] > steps + 2, "all work again")
            after = storm.pids()
            assert after.pop("nats-server") != before.pop("nats-server")
            assert after == before
        audit = await asyncio.to_thread(storm.audit)
    assert_is_clean(audit)


@contextlib.contextmanager
def disk_of(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A file system of that size; skips the test where mounting is not permitted."""
    with contextlib.ExitStack() as mounted:
        try:
            disk = mounted.enter_context(small_disk(folder, megabytes=megabytes))
        except OSError as error:
            pytest.skip(str(error))
        yield disk
