"""What is no death but goes on for a while: everybody waits, says so, and goes on; nothing is lost or trained twice.

Real processes on a real nats-server. A connection is away for CUT_SECONDS: some by default, ASYNCRL_CUT_SECONDS=60 for
a night.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.bus.server import EmbeddedServer
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.faults import SPACE_IN_LOG
from asyncrl.topics import ACTORS, TRAJECTORIES
from tests.bus_fixtures import Proxy
from tests.chaos.storm import REPOSITORY, Storm
from tests.conftest import MAX_MESSAGE_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CUT_SECONDS = float(os.environ.get("ASYNCRL_CUT_SECONDS", "8"))
MESSAGE_BYTES = f"bus.max_message_bytes={MAX_MESSAGE_BYTES}"
PATIENT = "run.stall_seconds=600"
"""The launcher is to wait too: what it cures is in test_liveness.py."""
LOST, BACK = "connection lost; everybody waits until it is back", "connected again"


def assert_is_clean(audit: dict[str, Any]) -> None:
    assert (audit["lost"], audit["duplicated"], audit["staleness_violations"]) == (0, 0, 0), audit
    assert audit["exit_code"] == 0
    assert audit["trained"] > 0


def storm_on(server: EmbeddedServer, folder: Path, *overrides: str, url: str = "") -> Storm:
    """A run on a server of the test's; its launcher, learner and own workers go there by ``url``."""
    address = f'bus.url="{url or server.url}"'
    return Storm(
        folder,
        seed=1,
        overrides=(address, MESSAGE_BYTES, PATIENT, *overrides),
        way=server.url,
        token=server.token,
    )


@contextlib.asynccontextmanager
async def worker(storm: Storm, name: str, *, url: str) -> AsyncIterator[None]:
    """One that joined by itself. It ends well when the run is finished."""
    words = ["rollout-worker", str(storm.run_file), "--name", name, "--set", f'bus.url="{url}"', "--set", MESSAGE_BYTES]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncrl", *words),
        cwd=REPOSITORY,
        env=storm.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
        assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


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


# -- a connection that is away -----------------------------------------------------------------------------------------


async def test_a_worker_whose_connection_is_away_goes_on_when_it_is_back(
    tmp_path: Path, own_server: EmbeddedServer, proxy: Proxy
) -> None:
    storm = storm_on(own_server, tmp_path, "rollout.workers=1")
    async with worker(storm, "x0", url=proxy.url), storm.up() as seen:
        await storm.until(lambda: seen.published.get("x0", 0) > 0, "x0 has joined")
        steps = seen.step[1]
        await cut_off(proxy)
        assert seen.step[1] > steps  # the others did not wait for it
        published = seen.published["x0"]
        await storm.until(lambda: seen.published["x0"] > published, "x0 works again")
    assert LOST in log_of(storm, "x0")
    assert BACK in log_of(storm, "x0")
    assert LOST not in log_of(storm, "learner")
    assert_is_clean(await asyncio.to_thread(storm.audit))


async def test_a_learner_whose_connection_is_away_goes_on_when_it_is_back(
    tmp_path: Path, own_server: EmbeddedServer, proxy: Proxy
) -> None:
    storm = storm_on(own_server, tmp_path, "rollout.workers=0", url=proxy.url)
    async with worker(storm, "x0", url=own_server.url), worker(storm, "x1", url=own_server.url), storm.up() as seen:
        learner = storm.pids()["learner"]
        await cut_off(proxy)
        steps = seen.step[1]
        await storm.until(lambda: seen.step[1] > steps + 2, "the learner trains again")
        assert storm.pids()["learner"] == learner  # it waited, and was not started again
        assert seen.step[0] == 0
    assert LOST in log_of(storm, "learner")
    assert BACK in log_of(storm, "learner")
    assert LOST not in log_of(storm, "x0")
    assert_is_clean(await asyncio.to_thread(storm.audit))


async def test_when_every_connection_is_away_all_go_on_when_they_are_back(
    tmp_path: Path, own_server: EmbeddedServer, proxy: Proxy
) -> None:
    storm = storm_on(own_server, tmp_path, url=proxy.url)
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


# -- a reader that is slow ---------------------------------------------------------------------------------------------


async def test_a_learner_that_the_server_drops_as_a_slow_consumer_reads_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while somebody floods the log; the server keeps 4 MiB for it, then drops the connection."""
    monkeypatch.setattr("asyncrl.bus.server._MAX_PENDING_BYTES", 0)
    with EmbeddedServer(tmp_path / "bus", max_message_bytes=MAX_MESSAGE_BYTES) as server:
        storm = storm_on(server, tmp_path)
        async with storm.up() as seen:
            learner = storm.pids()["learner"]
            os.kill(learner, signal.SIGSTOP)
            try:
                while "Slow Consumer" not in (server.directory / "nats-server.log").read_text():
                    await flood(storm, megabytes=4)
            finally:
                os.kill(learner, signal.SIGCONT)
            steps = seen.step[1]
            await storm.until(lambda: seen.step[1] > steps + 2, "the learner trains again")
            assert storm.pids()["learner"] == learner
        assert LOST in log_of(storm, "learner")
        assert BACK in log_of(storm, "learner")
        audit = await asyncio.to_thread(storm.audit)
    assert_is_clean(audit)


async def flood(storm: Storm, *, megabytes: int) -> None:
    """Groups that nobody asked for, at the log."""
    assert storm.bus is not None
    for _ in range(megabytes):
        group_id = 10**9 + uuid.uuid4().int % 10**9
        prompt = np.zeros(MAX_MESSAGE_BYTES // 4 - 1024, np.int32)
        group = TrajectoryGroup(group_id=group_id, prompt_tokens=prompt, trajectories=(), worker="flood", error="junk")
        await storm.bus.publish(TRAJECTORIES, group, key=str(group_id))


# -- no room -----------------------------------------------------------------------------------------------------------


async def test_while_the_log_is_full_workers_wait_for_room_in_sight_and_go_on_with_it(
    tmp_path: Path, own_server: EmbeddedServer
) -> None:
    storm = storm_on(own_server, tmp_path)
    async with storm.up() as seen:
        before = storm.pids()
        async with full_log(storm):
            while not await all_wait_for_room(storm):
                await asyncio.sleep(0.1)
            steps = seen.step[1]
        await storm.until(lambda: seen.step[1] > steps + 5, "all work again")
        assert storm.pids() == before
    assert_is_clean(await asyncio.to_thread(storm.audit))


@contextlib.asynccontextmanager
async def full_log(storm: Storm) -> AsyncIterator[None]:
    """The stream of trajectories takes nothing more."""
    bus: Any = storm.bus
    name = bus._layout.stream(TRAJECTORIES)
    found = (await bus._connection.api(f"STREAM.INFO.{name}"))["config"]
    await bus._connection.api(f"STREAM.UPDATE.{name}", found | {"max_bytes": 1})
    try:
        yield
    finally:
        await bus._connection.api(f"STREAM.UPDATE.{name}", found)


async def all_wait_for_room(storm: Storm) -> bool:
    """As their heartbeats say."""
    assert storm.bus is not None
    beats = await storm.bus.states(ACTORS)
    return all(any(wait.what == SPACE_IN_LOG for wait in beats[name].waits) for name in ("w0", "w1", "w2"))


async def test_while_the_servers_disk_is_full_everybody_waits_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """Its store is on a disk of its own, of 64 MiB. Only the server is started again, and not before there is room."""
    stall_seconds = 15
    stalls = f"run.stall_seconds={stall_seconds}"
    storm = Storm(tmp_path, seed=1, overrides=("bus.max_log_bytes=8388608", MESSAGE_BYTES, stalls))
    with small_disk(storm.run_directory / "nats", megabytes=64) as disk:
        async with storm.up() as seen:
            before = storm.pids()
            fill(disk)
            await storm.until(lambda: "has stored nothing" in storm.output, "the watcher says so")
            await asyncio.sleep(stall_seconds)
            assert storm.pids() == before
            (disk / "filler").unlink()
            steps = seen.step[1]
            await storm.until(lambda: seen.step[1] > steps + 2, "all work again")
            after = storm.pids()
            assert after.pop("nats-server") != before.pop("nats-server")
            assert after == before
        audit = await asyncio.to_thread(storm.audit)
    assert_is_clean(audit)


@contextlib.contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A file system of that size."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))
