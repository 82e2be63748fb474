"""Forged or replayed messages on the learner's topics are rejected, over both buses."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.port import Bus
from asyncrl.bus.rejections import Rejections
from asyncrl.launch.keys import worker_keys
from asyncrl.messages import Progress, PromptGroup, replace
from asyncrl.messages.control import Claim
from asyncrl.messages.freshness import Freshness
from asyncrl.messages.signing import Signatures, SigningKey
from asyncrl.messages.topics import (
    ACTORS,
    PROGRESS,
    PROMPTS,
    QUARANTINE,
    TRAJECTORIES,
    TRANSFERS,
    WEIGHTS,
    worker_named,
)
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from tests.harness.buses import group, heartbeat, progress, prompt, taken

pytestmark = pytest.mark.usefixtures("no_blocking")

LEARNER, EVIL = SigningKey(b"l" * 32), SigningKey(b"e" * 32)
REQUEST = TransferRequest(engine="w0", group="w0-1", num_ranks=1)

Speak = Callable[[Signatures], Awaitable[Bus]]


def learner() -> Signatures:
    return Signatures(run="r", own=LEARNER, life=1, learner=LEARNER.public)


def reader() -> Signatures:
    return Signatures(run="r", learner=LEARNER.public)


def forger() -> Signatures:
    return Signatures(run="r", own=EVIL, life=10**6)


@pytest.fixture
def speak(bus_factory: Any) -> Speak:
    """``await speak(SIGNATURES)``: one more connection to the same run that signs and checks with SIGNATURES."""

    async def open_one(signatures: Signatures) -> Bus:
        if not isinstance(await bus_factory(), MemoryBus):
            return await bus_factory(signatures=signatures)  # type: ignore[no-any-return]
        other = copy.copy(await bus_factory())  # another view of the bus that one process shares
        other._signatures, other.rejections = signatures, Rejections()
        other._pieces = copy.copy(other._pieces)
        other._pieces._bus, other._pieces._signatures = other, signatures
        return other  # type: ignore[no-any-return]

    return open_one


async def test_a_state_of_the_learner_is_read(speak: Speak) -> None:
    here, there = await speak(learner()), await speak(reader())
    await here.put(PROGRESS, progress(3))
    assert (await there.states(PROGRESS))[""].step == 3
    async with there.watch(PROGRESS) as states:
        assert (await anext(states)).step == 3


async def test_a_forged_state_is_passed_over_and_counted(speak: Speak) -> None:
    here, there, evil = await speak(learner()), await speak(reader()), await speak(forger())
    await here.put(PROGRESS, progress(3))
    async with there.watch(PROGRESS) as states:
        assert (await anext(states)).step == 3
        await evil.put(PROGRESS, Progress(incarnation=9, step=9, policy_version=9, finished=True))
        waiting = asyncio.ensure_future(anext(states))
        while not there.rejections.total:
            await asyncio.sleep(0.01)
        assert await there.states(PROGRESS) == {}
        await here.put(PROGRESS, progress(4))
        assert (await waiting).step == 4
    (row,) = {where for where, _, _ in there.rejections.counts}
    assert row == "progress"


async def test_what_the_learner_said_before_is_not_taken_again(speak: Speak) -> None:
    here, there, evil = await speak(learner()), await speak(reader()), await speak(Signatures())
    recorded = await recording(here, evil, lambda: here.put(PROGRESS, progress(3)))
    async with there.watch(PROGRESS) as states:
        assert (await anext(states)).step == 3
        await here.put(PROGRESS, progress(4))
        assert (await anext(states)).step == 4
        waiting = asyncio.ensure_future(anext(states))
        await recorded()
        while not there.rejections.total:
            await asyncio.sleep(0.01)
        await here.put(PROGRESS, progress(5))
        assert (await waiting).step == 5


async def test_a_forged_prompt_is_a_problem_and_no_prompt(speak: Speak) -> None:
    here, there, evil = await speak(learner()), await speak(reader()), await speak(forger())
    await evil.publish(PROMPTS, prompt(1), key="1")
    await here.publish(PROMPTS, prompt(2), key="2")
    async with taken(there, 2) as (forged, honest):
        assert forged.message is None and "the run's learner is" in forged.problem
        assert honest.message is not None and not honest.problem


async def test_a_prompt_is_no_other_groups(speak: Speak) -> None:
    here, there, evil = await speak(learner()), await speak(reader()), await speak(Signatures())
    recorded = await recording(here, evil, lambda: here.publish(PROMPTS, prompt(1), key="1"), topic=PROMPTS, key="2")
    await recorded()
    async with taken(there, 2) as deliveries:
        problems: dict[str, PromptGroup | None] = {one.key: one.message for one in deliveries}
    assert problems["1"] is not None and problems["2"] is None


async def test_an_offer_of_weights_is_the_learners(speak: Speak) -> None:
    there = await speak(reader())
    for signatures, version in ((forger(), 0), (learner(), 7)):
        server = await speak(signatures)
        async with server.serve(TRANSFERS) as questions:
            asking = asyncio.ensure_future(there.ask(TRANSFERS, REQUEST, seconds=10))
            await (await anext(questions)).answer(TransferOffer(policy_version=7))
            answer = await asking
        assert (answer.policy_version if answer else 0) == version


async def test_a_worker_that_joined_by_itself_is_heard_and_nobody_else_under_its_name(speak: Speak) -> None:
    own = SigningKey(b"w" * 32)
    name = f"gpu7-{own.public[:16]}"
    guest = await speak(Signatures(run="r", own=own, life=1))
    there = await speak(Signatures(run="r", own=LEARNER, learner=LEARNER.public, bound=worker_keys.digits_in))
    await guest.publish(TRAJECTORIES, replace(group(0), worker=name), key="0")
    await guest.put(ACTORS, heartbeat(name), key=name)
    assert list(await there.states(ACTORS)) == [name]
    for number, signatures in enumerate((forger(), Signatures()), start=1):
        evil = await speak(signatures)
        await evil.publish(TRAJECTORIES, replace(group(number), worker=name), key=str(number))
        await evil.put(ACTORS, heartbeat(name), key=name)
        assert await there.states(ACTORS) == {}
    async with there.read(TRAJECTORIES) as records:
        found = [await anext(records) for _ in range(3)]
    assert [record.message is not None for record in found] == [True, False, False]
    assert {record.problem for record in found[1:]} == {f"bears the name {name!r} but was signed by another process"}


async def test_whether_a_name_is_taken_its_own_key_says_alone(speak: Speak) -> None:
    """Otherwise a liar could claim that every name is taken and keep all workers out."""
    own, namesake = SigningKey(b"w" * 32), Claim(host="there", pid=1)
    for signatures, is_believed in ((forger(), False), (Signatures(), False), (Signatures(run="r", own=own), True)):
        server, there = await speak(signatures), await speak(Signatures(run="r", own=own, learner=LEARNER.public))
        async with server.serve(worker_named("w0")) as questions:
            asking = asyncio.ensure_future(there.ask(worker_named("w0"), Claim(host="here", pid=2), seconds=10))
            await (await anext(questions)).answer(namesake)
            assert await asking == (namesake if is_believed else None)


# -- replayed messages -------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def listener(clock: Clock, *, after: Signatures | None = None) -> Signatures:
    """A learner with this clock; ``after`` is its previous incarnation."""
    one = Signatures(run="r", own=LEARNER, learner=LEARNER.public, bound=worker_keys.digits_in)
    one.heard = Freshness(clock=clock)
    one.heard.remember(after.heard.newest() if after else {})
    return one


async def test_old_heartbeats_of_a_worker_keep_nobody_alive(speak: Speak) -> None:
    """The heartbeats are recorded from the bus and published again by a client with full rights on the server.

    This also holds after a restart of the learner.
    """
    own, clock, recorded = SigningKey(b"w" * 32), Clock(), list[bytes]()
    name = f"gpu7-{own.public[:16]}"
    guest, evil = await speak(Signatures(run="r", own=own, life=1)), await speak(forger())
    before = listener(clock)
    there = await speak(before)
    for beat in range(20):
        await guest.put(ACTORS, replace(heartbeat(name), beat=beat), key=name)
        recorded.append(await bytes_of(guest, name))
        assert (await there.states(ACTORS))[name].beat == beat
        clock.now += 2.0
    after = await speak(listener(clock, after=before))
    for reader in (there, after):
        for data in (recorded[0], recorded[6], recorded[12]):
            await put_bytes(evil, name, data)
            assert await reader.states(ACTORS) == {}
    assert after.rejections.total == 3  # type: ignore[attr-defined]
    await guest.put(ACTORS, replace(heartbeat(name), beat=20), key=name)
    for reader in (there, after):
        assert (await reader.states(ACTORS))[name].beat == 20
    again = await speak(Signatures(run="r", own=own, life=2))  # the worker was restarted
    await again.put(ACTORS, replace(heartbeat(name), beat=1), key=name)
    assert (await there.states(ACTORS))[name].beat == 1
    clock.now += 10.0
    await put_bytes(evil, name, recorded[19])
    assert await there.states(ACTORS) == {}
    await again.put(ACTORS, replace(heartbeat(name), beat=2), key=name)
    clock.now += 10.0 * ACTORS.seconds_to_live
    last = await bytes_of(again, name)
    assert (await there.states(ACTORS))[name].beat == 2
    clock.now += 10.0 * ACTORS.seconds_to_live  # the worker is long gone, and this is its last heartbeat
    await put_bytes(evil, name, last)
    assert await there.states(ACTORS) == {}


async def bytes_of(bus: Any, key: str) -> bytes:
    """Return the bytes that the bus stores for an actor, signature included."""
    if isinstance(bus, MemoryBus):
        return bus._state(ACTORS).present()[key].data
    found = await bus._last(ACTORS, bus._layout.subject(ACTORS, key))
    return bytes(found.data)


async def put_bytes(bus: Any, key: str, data: bytes) -> None:
    if isinstance(bus, MemoryBus):
        bus._state(ACTORS).put(key, data)
    else:
        await bus._set(ACTORS, key, data, {})


async def recording(
    here: Any, evil: Any, say: Callable[[], Awaitable[Any]], **at: Any
) -> Callable[[], Awaitable[None]]:
    """Publish a message. Return a function that replays the same bytes, optionally under another ``topic`` and
    ``key``."""
    sealed: list[bytes] = []
    seal = here._signatures.seal

    def overhear(topic: Any, key: str, data: bytes) -> bytes:
        sealed.append(seal(topic, key, data))
        return sealed[-1]

    here._signatures.seal = overhear
    await say()
    here._signatures.seal = seal

    async def again() -> None:
        topic, key = at.get("topic", PROGRESS), at.get("key", "")
        evil._signatures.seal = lambda *_: sealed[0]
        message: Any = prompt(1) if topic is PROMPTS else progress(1)
        await (evil.publish(topic, message, key=key) if topic is PROMPTS else evil.put(topic, message, key=key))

    return again


def test_the_learner_alone_speaks_on_its_topics() -> None:
    assert all(topic.is_learners for topic in (PROGRESS, PROMPTS, WEIGHTS, QUARANTINE))
