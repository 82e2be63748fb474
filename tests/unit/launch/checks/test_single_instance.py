"""A process keeps its name in a run while it lives, and not longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import Bus
from asyncrl.errors import BusError, ConfigError, Forbidden
from asyncrl.launch.checks import single_instance
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES


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


async def test_workers_of_other_names_and_a_launcher_do_not_meet(bus: Bus) -> None:
    async with (
        single_instance.worker(bus, "w0", run="mine"),
        single_instance.worker(bus, "w1", run="mine"),
        single_instance.launcher(bus, run="mine"),
    ):
        with pytest.raises(ConfigError, match=r"run.name: `asyncrl run` of 'mine' is up on this bus: process"):
            async with single_instance.launcher(bus, run="mine"):
                pass


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


class TornBus(MemoryBus):
    """A bus that forgets which processes serve on it."""

    @contextlib.asynccontextmanager
    async def serve(self, service: Any) -> AsyncIterator[Any]:
        async def questions() -> AsyncIterator[Any]:
            raise BusError("lost")
            yield

        yield questions()


async def test_who_cannot_answer_for_itself_any_more_ends() -> None:
    bus = TornBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    with pytest.raises(ExceptionGroup) as ended:
        async with single_instance.worker(bus, "w0", run="mine"):
            await asyncio.Event().wait()
    assert [str(error) for error in ended.value.exceptions] == ["lost"]


async def test_what_fails_inside_is_raised_as_it_is(bus: Bus) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with single_instance.worker(bus, "w0", run="mine"):
            raise KeyError("mine")


class OldServer(MemoryBus):
    """A bus whose roles do not know these services."""

    async def ask(self, *_: Any, **__: Any) -> None:
        raise Forbidden("the role or run may not do this")


async def test_a_server_whose_roles_are_older_lets_workers_in_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    bus = OldServer(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    async with single_instance.worker(bus, "w0", run="mine"):
        pass
    (line,) = caplog.messages
    assert "write the server's roles again with bin/nats-config" in line
