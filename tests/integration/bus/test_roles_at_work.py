"""How the bus works for roles that may not create consumers, purge streams or answer requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from asyncrl.bus.jetstream.kv import Lease
from asyncrl.messages.topics import ACTORS, SEGMENTS, TRAJECTORIES
from tests.harness.buses import heartbeat, publish_groups
from tests.harness.roles import Server, connected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("nats") / "server")
    yield made
    made.close()


@pytest.fixture
async def learner(server: Server) -> AsyncIterator[Any]:
    async with connected(server, "learner") as bus:
        yield bus


@pytest.fixture
async def worker(server: Server, learner: Any) -> AsyncIterator[Any]:
    async with connected(server, "rollout-worker") as bus:
        yield bus


async def test_a_log_is_read_in_order_without_a_consumer_while_it_is_trimmed_and_grows(
    server: Server, learner: Any
) -> None:
    first = await learner.last_sequence(TRAJECTORIES) + 1
    await publish_groups(learner, *range(100, 130))
    await learner.trim(TRAJECTORIES, through=first + 9)
    async with connected(server, "observer") as observer, observer.read(TRAJECTORIES) as records:
        found = [await anext(records) for _ in range(20)]
        assert [record.sequence for record in found] == list(range(first + 10, first + 30))
        assert [record.key for record in found] == [str(number) for number in range(110, 130)]
        await publish_groups(learner, 130)
        assert (await anext(records)).key == "130"


async def test_an_observer_sees_every_actor_of_a_large_fleet(server: Server, learner: Any) -> None:
    names = {f"w{number}" for number in range(150)}
    async with connected(server, "observer") as observer:
        await asyncio.gather(*(learner.put(ACTORS, heartbeat(name), key=name) for name in names))
        assert (await observer.states(ACTORS)).keys() == names


async def test_removed_states_leave_nothing_on_the_server(learner: Any, worker: Any) -> None:
    for number in range(20):
        await worker._set(SEGMENTS, f"w0/7/{number}", b"data", {})
    await worker._set(SEGMENTS, "w0/8/0", b"data", {})
    await worker.forget(SEGMENTS, key="w0/7/")
    left = {worker._layout.subject(SEGMENTS, "w0/8/0")}
    async with asyncio.timeout(60):
        while set(await worker._subjects(SEGMENTS)) > left:
            await asyncio.sleep(0.05)
    assert set(await worker._subjects(SEGMENTS)) == left, "what it did not remove stays"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leases that were not free when requested."""
    seen: list[str] = []
    wait = Lease._wait

    async def noted(lease: Lease) -> None:
        seen.append(lease._name)
        await wait(lease)

    monkeypatch.setattr(Lease, "_wait", noted)
    return seen


async def test_a_worker_cannot_take_a_lease_of_the_learners(learner: Any, worker: Any, waits: list[str]) -> None:
    async with worker.lease("launcher ", holder="w0"), learner.lease("launcher ", holder="l"):
        assert waits == []


async def test_a_lease_that_was_just_released_is_taken_at_once(server: Server, worker: Any, waits: list[str]) -> None:
    """Its release mark is still stored. The next holder was not waiting, so it got no notification."""
    async with connected(server, "rollout-worker") as other:
        for number in range(10):
            async with (worker, other)[number % 2].lease("load-7", holder="w0"):
                pass
    assert waits == []
