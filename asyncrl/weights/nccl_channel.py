"""The nccl channel: model folders, and weights sent from the memory of every learner rank that has a part of the model.

An engine that shares a GPU with the learner maps the ranks' memory and copies it (ipc.py). Any other has a separate
group with each of these ranks (nccl.py): it takes their parts one after the other, and switches once it has all.
Tests: tests/unit/weights/test_nccl.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from asyncrl.bus.port import Bus
from asyncrl.config.adapter import RunConfig
from asyncrl.config.checks import Range
from asyncrl.errors import MessageError, WeightsError
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.ipc import IPCReceiver
from asyncrl.weights.nccl import CUMEM, CollectiveOffer, CollectiveRequest, Sender, group_of_part
from asyncrl.weights.port import Ask, BroadcastUpdater, LoadReport, Receiver, WeightUpdater

_REACH_SECONDS: Final = 5.0
_ONE_GPU: Final = "Duplicate GPU detected"
"""NCCL's words for two processes on the same GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[weights.options] of the nccl channel."""

    host: str = ""
    """The learner's address as seen by engines; empty: the one it uses to reach the bus."""
    bucket_megabytes: Annotated[int, Range(low=1, high=2048)] = 2048
    """MiB that an engine needs besides its weights while it receives; more only for a tensor that is larger. Smaller
    values lengthen the pause."""


class NCCLChannel(FilesChannel):
    """Has a sender, and stores the folders that somebody reads."""

    options_type = Options
    takes = frozenset()
    sends_from_memory = True

    @classmethod
    def build(cls, run: RunConfig, *, bus: Bus) -> NCCLChannel:
        options: Options = cls.options(run)
        return cls(
            run.weights_directory,
            keep=run.weights.keep,
            model_path=Path(run.model.path),
            host=options.host or bus.own_address,
            bucket_bytes=options.bucket_megabytes * 2**20,
        )

    @classmethod
    def learner_environment(cls, run: RunConfig) -> Mapping[str, str]:
        return {CUMEM: "0"}  # as in SGLang

    def __init__(self, directory: Path, *, keep: int, model_path: Path, host: str, bucket_bytes: int) -> None:
        """See Sender."""
        super().__init__(directory, keep=keep, model_path=model_path)
        self._sender = Sender(host, bucket_bytes=bucket_bytes)

    def must_store(self, policy_version: int) -> bool:
        return False

    @property
    def sender(self) -> Sender:
        return self._sender

    def receiver(self, updater: WeightUpdater, *, engine: str) -> Receiver | None:
        collective = CollectiveReceiver(updater, engine=engine) if isinstance(updater, BroadcastUpdater) else None
        return NearestReceiver(IPCReceiver(updater, engine=engine), collective) if updater.can_update else collective


class NearestReceiver:
    """See Receiver in weights/port.py. Copies the learner's memory if it is in reach, and joins a group otherwise."""

    def __init__(self, ipc: IPCReceiver, collective: CollectiveReceiver | None) -> None:
        self._ipc = ipc
        self._collective = collective
        self._chosen: Receiver | None = None

    async def join(self, ask: Ask) -> None:
        chosen, self._chosen = self._chosen, None  # a failure forgets it: the next learner may be elsewhere
        if chosen is None:
            chosen = await self._choose(ask)
        else:
            await chosen.join(ask)
        self._chosen = chosen

    async def receive(self, ask: Ask) -> LoadReport:
        assert self._chosen is not None
        chosen, self._chosen = self._chosen, None
        report = await chosen.receive(ask)
        self._chosen = chosen
        return report

    async def _choose(self, ask: Ask) -> Receiver:
        """Return the receiver that has joined."""
        try:
            await self._ipc.join(ask)
            return self._ipc
        except WeightsError as error:
            if self._collective is None:
                raise
            reason = error
        try:
            await self._collective.join(ask)
        except WeightsError as error:
            raise WeightsError(f"{error} (nor can its memory be mapped: {reason})") from error
        return self._collective


class CollectiveReceiver:
    """See Receiver in weights/port.py. The engine keeps a group with every exporting rank until a failure."""

    def __init__(self, updater: BroadcastUpdater, *, engine: str) -> None:
        """``engine``: name of the engine in the run."""
        self._updater = updater
        self._engine = engine
        self._group = ""
        self._has_joined = False
        self._refusal = ""
        self._rename()

    async def join(self, ask: Ask) -> None:
        if self._has_joined:
            return
        if self._refusal:
            raise WeightsError(self._refusal)
        own = _decode_offer(await ask(self.request))
        parts = (own, *own.others)
        for found in parts:
            await _reach(found.host, found.port)  # otherwise the engine might block for minutes
        try:
            for number, found in enumerate(parts):
                group = group_of_part(self._group, number)
                await self._updater.join(group, host=found.host, port=found.port, kind=found.collective)
                self._joined.append(group)
        except WeightsError:
            await self.leave()
            raise
        self._has_joined = True

    async def receive(self, ask: Ask) -> LoadReport:
        try:
            offer = await ask(self.request)
            own = _decode_offer(offer)
            parts = [(group_of_part(self._group, number), one.buckets) for number, one in enumerate((own, *own.others))]
            return await self._updater.receive(offer.version, parts)
        except WeightsError as error:
            await self.leave()
            if _ONE_GPU not in str(error):
                raise
            # Every further group would cost the server memory, until it dies.
            self._refusal = (
                f"{self._engine} is on the learner's GPU, where NCCL connects no two processes, and its server cannot "
                'map the learner\'s memory; use weights.channel = "files", or a server that asyncrl starts'
            )
            raise WeightsError(self._refusal) from error

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(
            engine=self._engine,
            group=self._group,
            num_ranks=self._updater.num_ranks,
            has_joined=self._has_joined,
            payload=encode(CollectiveRequest(buckets_at_once=self._updater.buckets_at_once)),
        )

    async def leave(self) -> None:
        """Leave all groups; the next request is for new ones."""
        left = self._joined
        self._rename()
        for group in left:
            await self._updater.leave(group)

    def _rename(self) -> None:
        self._group = f"{self._engine}-{uuid.uuid4().hex[:8]}"
        self._joined: list[str] = []
        self._has_joined = False


def _decode_offer(offer: TransferOffer) -> CollectiveOffer:
    try:
        return decode(offer.payload, CollectiveOffer)
    except MessageError as error:
        raise WeightsError(f"the learner's offer is none of this channel: {error}") from error


async def _reach(host: str, port: int) -> None:
    """Raise WeightsError if no server listens at the address."""
    try:
        async with asyncio.timeout(_REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer in {_REACH_SECONDS:g} s"
        raise WeightsError(
            f"cannot reach the learner at {host}:{port}: {reason}; set weights.options.host to its address as "
            "engines see it"
        ) from error
    writer.close()
