"""Publishes new policy versions through the weight channel while the learner continues training.

WeightPublisher announces each version; WeightSender answers engines that ask for the newest one from the learner's
memory, and sends it during the next step. Engines that receive weights so need no folder: one is written only of a
version that somebody reads: an evaluation, say, or an engine that could not receive it (``WeightPublisher._is_read``).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncrl.actors.base import Actor
from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.evaluator import Evaluator
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus, Request
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.topics import ACTORS, SENT, TRANSFERS, WEIGHTS
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.weights.after_write import AfterWrite
from asyncrl.weights.port import Sender, WeightChannel

if TYPE_CHECKING:
    from asyncrl.tensors.snapshot import Snapshot
    from asyncrl.weights.kept_models import KeptModels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    snapshot: Snapshot
    incarnation: int
    policy_version: int
    since: float


class WeightPublisher:
    """The newest version wins: a write in progress is finished, and of the versions that arrive during it only the last
    one is written.

    Weights sent from memory are announced immediately, folders once they are written; both always in order.
    """

    def __init__(
        self,
        bus: Bus,
        channel: WeightChannel,
        *,
        waits: WaitTracker | None = None,
        resumed_from: int = 0,
        evaluator: Evaluator | None = None,
        after_write: AfterWrite | None = None,
        models: KeptModels | None = None,
    ) -> None:
        """
        waits         the learner's wait tracker
        resumed_from  the policy version that the learner started from
        evaluator     learns of each stored version before its folder is announced
        after_write   called for each stored version before that (weights.after_write)
        models        keeps some of them for good
        """
        self._models = models
        self._after_write = after_write
        self._evaluator = evaluator
        self._resumed_from = resumed_from
        self._waits = waits or WaitTracker()
        self._disk = Disk(self._waits)
        self._bus = bus
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._next: _Version | None = None  # the newest version, until it is stored or withdrawn
        self._is_folder_wanted = False  # that of the newest version, or of a newer one
        self._writing: asyncio.Task[None] | None = None
        self._num_engines = 0
        self.seconds = 0.0
        """Seconds from the last version's snapshot to its announcement: sent from memory if it is, else as a folder."""
        self.num_bytes = 0
        """Bytes stored for the last version written."""

    @property
    def sends(self) -> bool:
        """Whether engines can receive weights from memory."""
        return self._channel.sender is not None

    def withdraw(self) -> None:
        """Let go of weights that the next snapshot replaces, so that it may take their memory: what engines may still
        ask for, and what was to be written next."""
        self._next = None
        if self._channel.sender is not None:
            self._channel.sender.withdraw()

    async def publish(
        self,
        snapshot: Snapshot,
        *,
        incarnation: int,
        policy_version: int,
        num_engines: int,
        group: asyncio.TaskGroup,
        is_kept: bool = False,
    ) -> None:
        """Announce a snapshot; if its folder is read, a task of ``group`` writes, hashes and announces it.

        num_engines  number of workers known to the learner; included in every announcement from now on
        is_kept      write the folder, or that of a newer version, in any case
        """
        self._num_engines = num_engines
        self._is_folder_wanted = self._is_folder_wanted or is_kept
        self._next = _Version(
            snapshot=snapshot, incarnation=incarnation, policy_version=policy_version, since=time.monotonic()
        )
        if self._channel.sender is not None:
            self._channel.sender.set_weights(snapshot, incarnation=incarnation, policy_version=policy_version)
            await self._announce(WeightVersion(incarnation=incarnation, policy_version=policy_version), key=SENT)
            self.seconds = time.monotonic() - self._next.since
        self._begin_to_write(group)

    def write_folder(self, group: asyncio.TaskGroup) -> None:
        """Write the newest version's folder, or that of a newer one: an engine could not receive it."""
        self._is_folder_wanted = True
        self._begin_to_write(group)

    async def wait(self) -> None:
        """Wait until the newest version is stored and announced, also if nobody but the user reads it."""
        self._is_folder_wanted = self._is_folder_wanted or self._next is not None
        self._begin_to_write()
        assert self._writing is not None
        await self._writing

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _announce(self, version: WeightVersion, *, key: str = "") -> None:
        await self._bus.put(
            WEIGHTS, replace(version, num_engines=self._num_engines, resumed_from=self._resumed_from), key=key
        )

    def _begin_to_write(self, group: asyncio.TaskGroup | None = None) -> None:
        """Write in a task of ``group``; None: the caller awaits it. There is one at a time."""
        if self._writing is None or self._writing.done():
            create = asyncio.create_task if group is None else group.create_task
            self._writing = create(self._write(), name="publish-weights")

    def _is_read(self, version: _Version) -> bool:
        return (
            self._is_folder_wanted
            or self._after_write is not None
            or (self._evaluator is not None and self._evaluator.is_due(version.policy_version))
            or (self._models is not None and self._models.is_due(version.policy_version))
            or self._channel.must_store(version.policy_version)
        )

    async def _write(self) -> None:
        while (first := self._next) is not None and self._is_read(first):
            self._next = None
            since, version = await self._disk.write(functools.partial(self._store, first), what="weights")
            if self._after_write is not None:
                await self._call(self._after_write, version)
            if self._evaluator is not None:
                await self._evaluator.begin_if_due(version)
            await self._announce(version)
            self.num_bytes = self._channel.published_bytes
            if not self.sends:
                self.seconds = time.monotonic() - since

    async def _store(self, first: _Version) -> tuple[float, WeightVersion]:
        """Write ``first``, or a newer version if one has arrived: after a full disk, the newest version is written.

        Return when it was published, and what was written.
        """
        taken, self._next, self._is_folder_wanted = self._next or first, None, False
        note = f"of version {taken.policy_version}"
        try:
            with self._waits.waiting(
                "weights to be written",
                on="disk",
                note=note,
                progress=lambda: self._channel.progress + (self._models.progress if self._models else 0),
            ):
                store = functools.partial(self._write_folders, taken)
                return taken.since, await asyncio.get_running_loop().run_in_executor(self._thread, store)
        except BaseException:
            self._next = self._next or taken
            raise

    def _write_folders(self, taken: _Version) -> WeightVersion:
        """Keep the model first: after a full disk it is not due again, and the channel has stored nothing twice."""
        incarnation, number = taken.incarnation, taken.policy_version
        if self._models is not None:
            self._models.publish(taken.snapshot, incarnation=incarnation, policy_version=number)
        return self._channel.publish(taken.snapshot, incarnation=incarnation, policy_version=number)

    async def _call(self, after_write: AfterWrite, version: WeightVersion) -> None:
        with self._waits.waiting("weights.after_write", on="after_write", note=f"of version {version.policy_version}"):
            await asyncio.get_running_loop().run_in_executor(self._thread, after_write, version)


class WeightSender(Actor):
    """consumes: weight requests    waits for: an engine's request    woken by: a weight follower"""

    role = "weight-sender"

    def __init__(self, name: str, bus: Bus, *, sender: Sender, publisher: WeightPublisher) -> None:
        super().__init__(name, bus)
        self._sender = sender
        self._publisher = publisher

    async def run(self) -> None:
        async with self.bus.serve(TRANSFERS) as requests, asyncio.TaskGroup() as group:
            async for request in requests:
                if request.question.by_folder:
                    self._publisher.write_folder(group)
                    await request.answer(TransferOffer())
                else:
                    group.create_task(self._answer(request), name=f"{self.name}.{request.question.engine}")

    async def _answer(self, request: Request[TransferRequest, TransferOffer]) -> None:
        question = request.question
        try:
            transfer = await asyncio.to_thread(self._sender.begin, question)
        except WeightsError as error:
            await request.answer(TransferOffer(problem=str(error)))
            return
        await request.answer(transfer.offer)
        if not question.has_joined:  # a joining engine: also drop engines that are gone
            await asyncio.to_thread(self._sender.forget, engines=set(await self.bus.states(ACTORS)))
        try:
            await _in_daemon_thread(transfer.send, name=f"send-{question.engine}")
        except WeightsError as error:
            self.log.warning("weights of version %d to %s: %s", transfer.offer.policy_version, question.engine, error)


async def _in_daemon_thread(function: Callable[[], None], *, name: str) -> None:
    """Run in a daemon thread: if an engine dies, a collective may never return, and the exit must not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        problem: Exception | None = None
        try:
            function()
        except Exception as error:  # re-raised in the awaiting task
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(settle, problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    await done
