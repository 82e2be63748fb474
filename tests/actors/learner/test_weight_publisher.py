"""The publisher on the memory bus: which versions are announced, which are written, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from asyncrl.actors.learner import disk
from asyncrl.actors.learner.weight_publisher import WeightPublisher, WeightSender
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import WeightsSection, tables
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.messages import WeightVersion
from asyncrl.messages.topics import TRANSFERS, WEIGHTS
from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.after_write import load_after_write
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.fakes import Engine, Loop, run_worker, until, worker
from tests.harness.weights import SNAPSHOT, Sender, running


class Channel(fakes.Channel):
    """Writes a version when the test allows it."""

    def __init__(self, sender: Sender | None, *, must_store: bool = True) -> None:
        self.sender: Any = sender
        self._must_store = must_store
        self.may_write = threading.Semaphore(0)
        self.writing: list[int] = []

    def must_store(self, policy_version: int) -> bool:
        return self._must_store

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        self.writing.append(policy_version)
        assert self.may_write.acquire(timeout=120)
        return super().publish(snapshot, incarnation=incarnation, policy_version=policy_version)


class Recorded(MemoryBus):
    """Records announcements."""

    def __init__(self) -> None:
        super().__init__(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        self.announced: list[tuple[str, int]] = []

    async def put(self, topic: Any, message: Any, *, key: str = "") -> None:
        await super().put(topic, message, key=key)
        self.announced.append((key or "folder", message.policy_version))


@contextlib.asynccontextmanager
async def publishing(channel: Channel, *, num_engines: int = 0) -> AsyncIterator[tuple[Recorded, WeightPublisher, Any]]:
    """A publisher, and ``publish(version)``."""
    bus = Recorded()
    publisher = WeightPublisher(bus, channel)
    async with asyncio.TaskGroup() as group:

        async def publish(version: int, *, is_kept: bool = False) -> None:
            await publisher.publish(
                SNAPSHOT,
                incarnation=0,
                policy_version=version,
                num_engines=num_engines,
                group=group,
                is_kept=is_kept,
            )

        yield bus, publisher, publish
    publisher.close()


async def test_what_is_held_is_announced_before_its_folder_is_written() -> None:
    channel = Channel(Sender())
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        assert bus.announced == [("sent", 1)]
        assert channel.sender.held == (0, 1)
        channel.may_write.release()
        await publisher.wait()
        assert bus.announced == [("sent", 1), ("folder", 1)]


async def test_the_newest_version_is_written_next_and_those_between_never() -> None:
    channel = Channel(Sender())
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        await until(lambda: channel.writing == [1])
        for version in (2, 3, 4):
            await publish(version)
        channel.may_write.release(2)
        await publisher.wait()
    assert channel.writing == [1, 4]
    assert bus.announced == [("sent", 1), ("sent", 2), ("sent", 3), ("sent", 4), ("folder", 1), ("folder", 4)]


async def test_a_version_that_is_withdrawn_for_the_next_one_is_never_written() -> None:
    channel = Channel(Sender())
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        await until(lambda: channel.writing == [1])
        await publish(2)
        publisher.withdraw()
        channel.may_write.release(2)
        await publisher.wait()
        await publish(3)
        await publisher.wait()
    assert channel.writing == [1, 3]
    assert bus.announced == [("sent", 1), ("sent", 2), ("folder", 1), ("sent", 3), ("folder", 3)]


async def test_who_waits_waits_for_the_newest_version() -> None:
    channel = Channel(None)
    async with publishing(channel) as (bus, publisher, publish):
        await publish(1)
        await until(lambda: channel.writing == [1])
        waiting = asyncio.create_task(publisher.wait())
        await publish(2)
        channel.may_write.release()
        await until(lambda: channel.writing == [1, 2])
        assert not waiting.done()
        channel.may_write.release()
        await waiting
        assert bus.announced == [("folder", 1), ("folder", 2)]


async def test_a_folder_that_nobody_reads_is_not_written_but_that_of_a_checkpoint_and_the_last_are() -> None:
    channel = Channel(Sender(), must_store=False)
    channel.may_write.release(3)
    async with publishing(channel) as (bus, publisher, publish):
        for version in (1, 2, 3):
            await publish(version, is_kept=version == 2)
            await until(lambda: publisher._writing.done())
        assert [one for one in bus.announced if one[0] == "folder"] == [("folder", 2)]
        await publisher.wait()
        await publisher.wait()
    assert channel.writing == [2, 3]
    assert bus.announced[-1] == ("folder", 3)


async def test_what_is_to_be_kept_and_overtaken_is_kept_as_the_newer_version() -> None:
    channel = Channel(Sender(), must_store=False)
    async with publishing(channel) as (_, publisher, publish):
        await publish(1, is_kept=True)
        await until(lambda: channel.writing == [1])
        await publish(2, is_kept=True)
        publisher.withdraw()  # as before each export
        await publish(3)
        channel.may_write.release(2)
        await until(lambda: publisher._writing.done())
        await publish(4)
        await until(lambda: publisher._writing.done())
    assert channel.writing == [1, 3]


@pytest.mark.parametrize("is_exporting", [False, True])
async def test_an_engine_that_could_not_receive_a_version_gets_its_folder_or_the_next_and_none_after(
    is_exporting: bool,
) -> None:
    """It asks again for each. After a learner's restart every engine asks once, as it has to meet the learner anew."""
    channel = Channel(Sender(), must_store=False)
    channel.may_write.release(9)
    async with (
        publishing(channel) as (bus, publisher, publish),
        running(WeightSender("weights", bus, sender=Sender(), publisher=publisher)),
    ):
        await publish(1)
        await until(lambda: publisher._writing.done())
        assert channel.writing == []
        if is_exporting:
            publisher.withdraw()
        request = TransferRequest(engine="w0", group="w0", num_ranks=1, by_folder=True)
        while await bus.ask(TRANSFERS, request, seconds=1) is None:
            await asyncio.sleep(0)  # until it serves
        for version in (2, 3) if is_exporting else (3,):
            await until(lambda: publisher._writing.done())
            await publish(version)
        await until(lambda: publisher._writing.done())
    assert channel.writing == [2 if is_exporting else 1]


async def test_one_folder_is_written_at_a_time_also_the_last_one_after_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written twice, it would be taken from under an engine that reads it."""
    monkeypatch.setattr(disk, "FIRST_PAUSE_SECONDS", 0.01)

    class Disk(Channel):
        is_full = True
        has_failed = False

        def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
            if self.is_full:
                self.has_failed = True
                raise OSError(errno.ENOSPC, "no room")
            return super().publish(snapshot, incarnation=incarnation, policy_version=policy_version)

    channel = Disk(Sender(), must_store=False)
    channel.may_write.release(2)
    async with publishing(channel) as (bus, publisher, publish), asyncio.TaskGroup() as group:
        await publish(1)
        await until(lambda: publisher._writing.done())
        waiting = group.create_task(publisher.wait())
        await until(lambda: channel.has_failed and publisher._next is not None)  # between two attempts
        publisher.write_folder(group)
        channel.is_full = False
        await waiting
    assert channel.writing == [1]
    assert bus.announced == [("sent", 1), ("folder", 1)]


async def test_a_version_is_stored_once_although_there_is_no_room_for_its_model_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "FIRST_PAUSE_SECONDS", 0.01)
    attempts: list[int] = []

    class Models:
        progress = 0

        def is_due(self, policy_version: int) -> bool:
            return True

        def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
            attempts.append(policy_version)
            if len(attempts) < 3:
                raise OSError(errno.ENOSPC, "no room")

    channel = Channel(Sender(), must_store=False)
    channel.may_write.release(3)
    publisher = WeightPublisher(Recorded(), channel, models=Models())  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        await publisher.publish(SNAPSHOT, incarnation=0, policy_version=1, num_engines=0, group=group)
    publisher.close()
    assert (attempts, channel.writing) == ([1, 1, 1], [1])


async def test_a_checkpoint_between_two_versions_comes_with_the_folder_of_the_one_that_engines_have(
    tmp_path: Path,
) -> None:
    channel = Channel(Sender(), must_store=False)
    channel.may_write.release(9)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop = Loop(bus, tmp_path, steps=9, max_staleness=9, publish_every=3, checkpoint_every=5, channel=channel)
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(bus, Engine(), max_staleness=9)))
        await loop.run_learner()
    assert channel.writing == [3, 9]  # those of the checkpoint after step 5, and of the last one


async def test_a_version_to_be_evaluated_kept_or_given_to_a_function_is_written() -> None:
    class Evaluator:
        def is_due(self, policy_version: int) -> bool:
            return policy_version == 2

        async def begin_if_due(self, weights: WeightVersion) -> None:
            assert weights.policy_version == 2

    class Models:
        progress = 0
        kept: ClassVar[list[int]] = []

        def is_due(self, policy_version: int) -> bool:
            return policy_version == 3

        def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
            self.kept.append(policy_version)

    made: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"evaluator": Evaluator()}, [2]),
        ({"models": Models()}, Models.kept),
        ({"after_write": load_after_write(f"{__name__}:upload")}, [1, 2, 3]),
    )
    for readers, written in made:
        channel = Channel(Sender(), must_store=False)
        channel.may_write.release(9)
        publisher = WeightPublisher(Recorded(), channel, **readers)
        for version in (1, 2, 3):
            async with asyncio.TaskGroup() as group:
                await publisher.publish(SNAPSHOT, incarnation=0, policy_version=version, num_engines=0, group=group)
        publisher.close()
        assert channel.writing == written
    assert Models.kept == [3]


async def test_a_channel_without_a_sender_announces_folders_only() -> None:
    channel = Channel(None)
    async with publishing(channel) as (bus, publisher, publish):
        assert not publisher.sends
        for version in (1, 2):
            await publish(version)
            channel.may_write.release()
            await publisher.wait()
    assert bus.announced == [("folder", 1), ("folder", 2)]


@pytest.mark.parametrize("function", ["given", "single_turn"])
async def test_only_each_third_version_and_the_last_are_published(
    bus_factory: Any, tmp_path: Path, function: str
) -> None:
    """And what is sampled in between is not older than the bound."""
    loop = Loop(
        await bus_factory(),
        tmp_path,
        steps=8,
        max_staleness=2,
        publish_every=3,
        function=function,
        staleness={"admission": "needed"},
    )
    engine = Engine()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_worker(worker(await bus_factory(), engine)))
        await loop.run_learner()
    assert loop.backend.steps == 8
    assert set(engine.loads) <= {3, 6, 8}
    assert (await loop.bus.states(WEIGHTS))[""].policy_version == 8
    assert loop.recorder.rows[-1]["weights/version"] == 8
    if function != "given":
        assert max(row["staleness/max"] for row in loop.recorder.rows) == 2
        assert all(row["staleness/dropped_groups"] == 0 for row in loop.recorder.rows)


uploaded: list[tuple[str, int]] = []


def upload(version: WeightVersion) -> None:
    uploaded.append((version.uri, version.policy_version))


def fail(version: WeightVersion) -> None:
    raise OSError(errno.ENOSPC, f"no room for {version.policy_version}")  # not of the disk that the run waits for


async def test_a_function_of_ones_own_has_each_version_before_engines_are_told_of_it() -> None:
    uploaded.clear()
    bus, channel = Recorded(), Channel(None)
    for name, problem in (("upload", ""), ("fail", "weights.after_write: .*:fail raised OSError: .* no room for 1")):
        publisher = WeightPublisher(bus, channel, after_write=load_after_write(f"{__name__}:{name}"))
        channel.may_write.release()
        with pytest.raises(AsyncRLError, match=problem) if problem else contextlib.nullcontext():
            try:
                async with asyncio.TaskGroup() as group:
                    await publisher.publish(SNAPSHOT, incarnation=0, policy_version=1, num_engines=0, group=group)
            except ExceptionGroup as error:
                raise error.exceptions[0] from None
        publisher.close()
        assert bus.announced == [("folder", 1)]  # not a second time
    assert uploaded == [((await bus.states(WEIGHTS))[""].uri, 1)]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("uploaded", "is a list, not a function"), ("Recorded", "function of one argument, version")],
)
def test_a_function_that_cannot_be_called_with_a_version_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^weights.after_write: .*{problem}"):
        load_after_write(f"{__name__}:{name}")


def test_there_is_no_version_between_two_steps() -> None:
    with pytest.raises(ConfigError, match="every_steps must be"):
        tables.build(WeightsSection, {"every_steps": 0}, "weights")
