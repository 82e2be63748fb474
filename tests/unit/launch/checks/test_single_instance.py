"""A process keeps its name in a run while it lives, and not longer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import single_instance
from tests import ROOT
from tests.conftest import BUS_SIZES


async def test_a_second_worker_of_a_name_is_told_where_the_first_is(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    async with single_instance.worker(bus, "w 0", run="mine"):
        with pytest.raises(ConfigError) as refused:
            async with single_instance.worker(other, "w 0", run="mine"):
                pass
        assert str(refused.value) == (
            f"--name: a rollout worker 'w 0' is up in run 'mine': process {os.getpid()} on {os.uname().nodename}; "
            "give this one another --name, or end that one first"
        )


async def has(bus: Bus, name: str, *, run: str = "mine") -> bool:
    """Whether a worker may have this name."""
    try:
        async with single_instance.worker(bus, name, run=run):
            return True
    except ConfigError:
        return False


async def test_a_name_comes_free_when_its_worker_leaves(bus_factory: Any) -> None:
    bus, other = await bus_factory(), await bus_factory()
    async with single_instance.worker(bus, "w0", run="mine"):
        assert not await has(other, "w0")
    assert await has(other, "w0")


async def test_of_many_that_start_at_once_one_begins(bus_factory: Any) -> None:
    begun, refused = 0, 0
    over = asyncio.Event()

    async def start(bus: Bus) -> None:
        nonlocal begun, refused
        try:
            async with single_instance.launcher(bus, run="mine"):
                begun += 1
                await over.wait()
        except ConfigError:
            refused += 1
            if refused == 4:
                over.set()

    async with asyncio.TaskGroup() as group:
        for bus in [await bus_factory() for _ in range(5)]:
            group.create_task(start(bus))
    assert (begun, refused) == (1, 4)


HOLDER = """
import asyncio, json, sys
from asyncrl.launch.checks import single_instance
from asyncrl.bus.jetstream.bus import JetStreamBus

async def main():
    url, token, sizes = sys.argv[1:]
    bus = await JetStreamBus.connect(url, run="killed", token=token, storage="file", **json.loads(sizes))
    async with single_instance.worker(bus, "w0", run="killed"):
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_who_was_killed_has_its_name_no_more(nats_server: EmbeddedServer, connect: Any) -> None:
    """The replacement waits neither for the heartbeat to expire nor for a lease."""
    bus = await connect(nats_server, run="killed")
    command = [sys.executable, "-c", HOLDER, nats_server.url, nats_server.token, json.dumps(BUS_SIZES)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        with pytest.raises(ConfigError, match=f"process {process.pid} on "):
            async with single_instance.worker(bus, "w0", run="killed"):
                pass
    finally:
        process.kill()
        await process.communicate()  # wait() may leave the pipe open
    assert await has(bus, "w0", run="killed")
