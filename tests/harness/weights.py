"""Both ends of a transfer without any weights, and the actors that move weights, on the memory bus."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from asyncrl.actors.learner.weight_publisher import WeightPublisher, WeightSender
from asyncrl.actors.rollout.load_gate import VersionNeed
from asyncrl.actors.rollout.weight_follower import WeightFollower
from asyncrl.bus.jetstream.connection import dial
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.objects import JetStreamObjects
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import BackendError, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.topics import SENT, TRANSFERS, WEIGHTS
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.tensors.snapshot import PartWorker, Snapshot
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.port import Ask, LoadReport
from tests.harness import fakes

SNAPSHOT = Snapshot.from_tensors([("weight", torch.zeros(4))])
TORN = (-1, -1)


def tensors(value: float = 1.0) -> Snapshot:
    return Snapshot.from_tensors(
        [("b", torch.full((3,), value)), ("a", torch.full((2, 2), value, dtype=torch.bfloat16))]
    )


def visible(channel: FilesChannel) -> set[str]:
    return {path.name for path in channel._directory.iterdir() if not path.name.startswith(".tmp-")}


class OtherRank:
    """A part of the weights that another rank holds. ``dies``: the rank fails instead of doing its work."""

    def __init__(self, snapshot: Snapshot, *, rank: int = 1, dies: bool = False) -> None:
        self.rank, self.dies = rank, dies
        self.snapshot = snapshot
        self._workers: dict[type[PartWorker], PartWorker] = {}

    def run(self, worker: type[PartWorker], command: bytes) -> bytes:
        if self.dies:
            raise BackendError(f"learner rank {self.rank} is gone with its part of the weights")
        made = self._workers.setdefault(worker, worker())
        return made(self.snapshot, command)


def in_parts(tensors: Iterable[tuple[str, torch.Tensor]], count: int = 2, *, dies: bool = False) -> Snapshot:
    """Distribute the tensors over ``count`` ranks; the first is this process."""
    given = list(tensors)
    own, *others = (Snapshot.from_tensors(given[number::count]) for number in range(count))
    ranks = (OtherRank(one, rank=number + 1, dies=dies) for number, one in enumerate(others))
    return replace(own, others=tuple(ranks))


class Sender:
    """The learner's end without any weights; records what was sent to which engine."""

    def __init__(self) -> None:
        self.held: tuple[int, int] | None = None
        self.groups: set[str] = set()
        self.sent: list[tuple[str, int]] = []

    def set_weights(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        self.held = (incarnation, policy_version)

    def withdraw(self) -> None:
        pass

    def begin(self, request: TransferRequest) -> Transfer:
        if self.held is None:
            raise WeightsError("nothing yet")
        if request.has_joined and request.group not in self.groups:
            raise WeightsError("join again")
        self.groups.add(request.group)
        if request.has_joined:
            self.sent.append((request.engine, self.held[1]))
        return Transfer(TransferOffer(incarnation=self.held[0], policy_version=self.held[1]))

    def forget(self, *, engines: Collection[str]) -> None:
        pass


class Transfer:
    def __init__(self, offer: TransferOffer) -> None:
        self.offer = offer

    def send(self) -> None:
        pass


class Receiver:
    """Loads offers into its engine. ``fails``: nothing arrives. ``tears``: half of it arrives."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._lives = 1
        self._has_joined = False
        self.fails = self.tears = False
        self.joins: list[str] = []

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(
            engine=self._name, group=f"{self._name}-{self._lives}", num_ranks=1, has_joined=self._has_joined
        )

    async def join(self, ask: Ask) -> None:
        if not self._has_joined:
            await ask(self.request)
            self.joins.append(self.request.group)
            self._has_joined = True

    async def receive(self, ask: Ask) -> LoadReport:
        try:
            offer = await ask(self.request)
            if self.fails or self.tears:
                self._engine.version = TORN if self.tears else self._engine.version
                raise WeightsError("the learner left")
        except WeightsError:
            self._lives += 1
            self._has_joined = False
            raise
        return await self._engine.switch("sent", offer.version)


class Engine(fakes.Engine):
    """Records where its weights came from. ``gate`` holds loads back while it is clear."""

    def __init__(self, name: str = "w0", *, receives: bool = True) -> None:
        super().__init__()
        self.receiver: Any = Receiver(self, name) if receives else None
        self.weight_updater: Any = self if receives else None
        self.took: list[tuple[str, int]] = []
        self.is_paused = False

    async def load(self, weights: WeightVersion) -> LoadReport:
        if weights.policy_version in self.unreadable:
            raise WeightsError("torn")
        return await self.switch("folder", weights.version)

    async def switch(self, source: str, version: tuple[int, int]) -> LoadReport:
        self.is_paused = True
        await self.gate.wait()
        self.is_paused = False
        self.version = version
        self.took.append((source, version[1]))
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)


class Channel(fakes.Channel):
    """The worker's end of a channel whose folders are always there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sender: Any = Sender()

    def receiver(self, updater: Any, *, engine: str) -> Any:
        return self._engine.receiver


def object_store(server: EmbeddedServer, run: str = "") -> JetStreamObjects:
    """Return the object store of ``run``, by default of a new run; the caller closes it."""

    layout = Layout(run=run or uuid.uuid4().hex[:8], max_prompts=1, max_log_bytes=1, ack_seconds=1.0, storage="memory")
    access = Credentials(token=server.token)
    return JetStreamObjects(functools.partial(dial, server.url, access=access, run=layout.run, seconds=10), layout)


async def announce(
    bus: MemoryBus, version: int, *, folder: bool, incarnation: int = 0, num_engines: int = 0, resumed_from: int = 0
) -> None:
    weights = WeightVersion(
        incarnation=incarnation, policy_version=version, num_engines=num_engines, resumed_from=resumed_from
    )
    await (bus.put(WEIGHTS, replace(weights, uri="folder")) if folder else bus.put(WEIGHTS, weights, key=SENT))


async def hold(bus: MemoryBus, sender: Sender, version: int, *, incarnation: int = 0) -> None:
    sender.set_weights(SNAPSHOT, incarnation=incarnation, policy_version=version)
    await announce(bus, version, folder=False, incarnation=incarnation)


@contextlib.asynccontextmanager
async def learner(bus: MemoryBus, sender: Sender, publisher: WeightPublisher | None = None) -> AsyncIterator[None]:
    publisher = publisher or WeightPublisher(bus, fakes.Channel())
    async with running(WeightSender("weights", bus, sender=sender, publisher=publisher)):
        while await bus.ask(TRANSFERS, TransferRequest(engine="?", group="?", num_ranks=1), seconds=1) is None:
            await asyncio.sleep(0)  # until it serves
        yield


@contextlib.asynccontextmanager
async def running(*actors: Any) -> AsyncIterator[None]:
    """Run actors; an exception of an actor fails the test."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for actor in actors:
            await actor.start()
            tasks.append(group.create_task(actor.run()))
        yield
        for task in tasks:
            task.cancel()


def follow(
    bus: MemoryBus, engine: Engine, *, name: str = "w0", load: str = "in_flight", verify: Any = None, **changes: Any
) -> WeightFollower:
    channel: Any = Channel(engine)
    if verify is not None:
        channel.verify = verify
    return WeightFollower(f"{name}.weights", bus, engine=engine, channel=channel, load=load, **changes)


def sampling(
    follower: WeightFollower, version: int, *, incarnation: int = 0, is_exact: bool = False
) -> contextlib.AbstractAsyncContextManager[None]:
    """Enter the gate like a generation that needs this version."""
    return follower.gate.sampling(VersionNeed((incarnation, version), is_exact), waits=follower.waits)
