"""A real server that loses data: its store goes back in time, or a stream is deleted or purged."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.bus.port import LogMark
from asyncrl.errors import BusLost
from asyncrl.messages.topics import PROGRESS, PROMPTS, TRAJECTORIES
from tests.harness.buses import first, progress, prompt, publish_groups, publish_prompts

Connect = Callable[..., Awaitable[JetStreamBus]]


@contextlib.asynccontextmanager
async def going_back(server: EmbeddedServer, folder: Path) -> AsyncIterator[None]:
    """On exit, the store is as it was on entry, as after a power loss."""
    store, image = server.directory / "jetstream", folder / "image"
    await asyncio.to_thread(shutil.copytree, store, image)
    yield
    await asyncio.to_thread(server.stop)
    shutil.rmtree(store)
    image.rename(store)
    await asyncio.to_thread(server.start)


async def test_read_ends_before_it_skips_an_entry_of_a_log_that_went_back(
    own_server: EmbeddedServer, connect: Connect, tmp_path: Path
) -> None:
    bus = await connect(own_server)
    await publish_groups(bus, 1, 2)
    async with contextlib.AsyncExitStack() as stack:
        async with going_back(own_server, tmp_path):
            await publish_groups(bus, 3, 4)
            identity = (await bus.log_state(TRAJECTORIES, mark=LogMark())).identity
            records = await stack.enter_async_context(bus.read(TRAJECTORIES))
            last = [await anext(records) for _ in range(4)][-1]
        await publish_groups(bus, 5, 6)  # as entries 3 and 4
        with pytest.raises(BusLost, match="entry 4 is not the one|ends at entry"):
            await anext(records)
    mark = LogMark(log=identity, sequence=last.sequence, stored=last.stored)
    assert "entry 4 is not the one" in (await bus.log_state(TRAJECTORIES, mark=mark)).problem
    assert [record.key for record in await first(bus, 4)] == ["1", "2", "5", "6"]


async def test_watch_continues_with_states_that_went_back(
    own_server: EmbeddedServer, connect: Connect, tmp_path: Path
) -> None:
    bus = await connect(own_server)
    await bus.put(PROGRESS, progress(1))
    async with contextlib.AsyncExitStack() as stack:
        async with going_back(own_server, tmp_path):
            for step in (2, 3, 4):
                await bus.put(PROGRESS, progress(step))
            states = await stack.enter_async_context(bus.watch(PROGRESS))
            assert (await anext(states)).step == 4
        await bus.put(PROGRESS, progress(5))  # its sequence is that of step 2, which was already seen
        assert (await anext(states)).step == 5


async def test_a_purged_prompt_is_published_again_though_the_server_remembers_its_id(
    nats_server: EmbeddedServer, connect: Connect
) -> None:
    bus = await connect(nats_server)
    await publish_prompts(bus, 1)
    await bus._connection.api(f"STREAM.PURGE.{bus._layout.stream(PROMPTS)}")
    assert await bus.publish(PROMPTS, prompt(1), key="1") is False
    assert await bus.publish(PROMPTS, prompt(1), key="1", again=True) is True
