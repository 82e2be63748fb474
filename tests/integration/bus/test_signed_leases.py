"""Forged, kept, stolen or replayed leases on a real server block no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.kv import Lease, lease_prefix
from asyncrl.bus.jetstream.streams import last_stored
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.launch.keys import worker_keys
from asyncrl.messages.freshness import LIVES
from asyncrl.messages.signing import UNSIGNED, Signatures, SigningKey
from tests.harness.buses import brief_leases

Workers = Callable[..., Awaitable[Any]]

ONE, TWO, EVIL = (SigningKey(letter * 32) for letter in (b"1", b"2", b"e"))
NAME = {key: f"w-{key.public[:16]}" for key in (ONE, TWO, EVIL)}


@pytest.fixture
async def worker(nats_server: EmbeddedServer, connect: Callable[..., Awaitable[JetStreamBus]]) -> Workers:
    """``await worker(KEY)``: one more worker of the run, with its own key or without a key."""
    run = f"leases-{SigningKey.generate().public[:8]}"

    async def one(key: SigningKey | None) -> Any:
        signed = Signatures(run=run, own=key, life=1, bound=worker_keys.digits_in) if key else UNSIGNED
        return await connect(nats_server, run=run, signatures=signed)

    return one


def subject_of(bus: Any, name: str) -> str:
    return lease_prefix(bus._layout, role=bus._role) + name


async def record_of(bus: Any, name: str) -> Any:
    stream = bus._layout.stream(Lease.TOPIC)
    return await last_stored(bus._connection, stream=stream, subject=subject_of(bus, name))


async def store(bus: Any, name: str, data: bytes) -> None:
    """Overwrite the lease, as the server permits every worker."""
    await bus._connection.store(subject_of(bus, name), data, headers={})


async def is_free(bus: Any, name: str, *, within: float = 60.0, **how: Any) -> bool:
    try:
        async with asyncio.timeout(within), bus.lease(name, holder="somebody", **how):
            return True
    except TimeoutError:
        return False


async def is_held(bus: Any, name: str, **how: Any) -> bool:
    return not await is_free(bus, name, within=2.0, **how)


async def test_a_record_that_its_holder_did_not_sign_holds_nothing(worker: Workers) -> None:
    one, evil = await worker(ONE), await worker(EVIL)
    stolen = evil._signatures.seal(Lease.TOPIC, "b", NAME[TWO].encode())
    elsewhere = evil._signatures.seal(Lease.TOPIC, "another", NAME[EVIL].encode())
    for name, data in {"a": NAME[TWO].encode(), "b": stolen, "c": elsewhere, "d": b"", "e": stolen[:40]}.items():
        await store(evil, name, data)
        assert await is_free(one, name), name
    assert one.rejections.total == 5
    assert {where for where, _, _ in one.rejections.counts} == {"leases"}


async def test_a_record_that_its_holder_signed_holds_it(worker: Workers) -> None:
    one, two = await worker(ONE), await worker(TWO)
    async with two.lease("load-0", holder=NAME[TWO]):
        assert await is_held(one, "load-0")
    assert await is_free(one, "load-0")


async def test_a_lease_among_namesakes_is_kept_by_nobody_else(worker: Workers) -> None:
    """Otherwise a liar could keep every worker from joining: each takes the lease of its name to look for a
    namesake."""
    one, again, evil = await worker(ONE), await worker(ONE), await worker(EVIL)
    async with evil.lease("workers w0", holder="host 1"):
        assert await is_free(one, "workers w0", is_namesakes=True)
    async with one.lease("workers w0", holder="host 1", is_namesakes=True):
        assert await is_held(again, "workers w0", is_namesakes=True)


async def test_a_lease_that_was_taken_away_by_a_forged_record_is_taken_back(
    worker: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief_leases(monkeypatch, seconds=2.0)
    one, two, evil = await worker(ONE), await worker(TWO), await worker(EVIL)
    async with one.lease("load-0", holder=NAME[ONE]):
        await store(evil, "load-0", b"forged")
        while (found := await record_of(one, "load-0")) is None or found.data == b"forged":
            await asyncio.sleep(0.01)
        assert await is_held(two, "load-0")


async def test_a_record_of_the_past_holds_nothing_for_long(worker: Workers) -> None:
    one, two, evil = await worker(ONE), await worker(TWO), await worker(EVIL)
    async with two.lease("load-0", holder=NAME[TWO]):
        old = (await record_of(two, "load-0")).data
    now = 0.0
    one._signatures.heard._clock = lambda: now
    await store(evil, "load-0", old)
    assert await is_held(one, "load-0")
    now += LIVES * Lease.TOPIC.seconds_to_live + 1.0
    await store(evil, "load-0", old)
    assert await is_free(one, "load-0")


async def test_a_run_without_keys_has_leases_as_before(worker: Workers) -> None:
    one, two = await worker(None), await worker(None)
    async with two.lease("load-0", holder="w1"):
        assert await is_held(one, "load-0")
