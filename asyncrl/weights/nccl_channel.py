"""The nccl channel: model folders, and weights sent from the memory of every learner rank that has a part of the model.

An engine has a separate group with each of these ranks (nccl.py). It takes their parts one after the other, and
switches once it has all. Tests: tests/unit/weights/test_nccl.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.bus.port import Bus
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.adapter import ChannelAdapter
from asyncrl.weights.collective import CollectiveReceiver
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.nccl import CUMEM, Sender
from asyncrl.weights.port import Intake


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[weights.options] of the nccl channel."""

    host: str = ""
    """The learner's address as seen by engines; empty: the one it uses to reach the bus."""
    bucket_megabytes: int = 2048
    """MiB that an engine needs besides its weights while it receives; more only for a tensor that is larger. SGLang
    servers with asyncrl's loader have four buckets of a quarter at a time, other servers one of this size. Smaller
    values lengthen the pause."""

    def __post_init__(self) -> None:
        if not 1 <= self.bucket_megabytes <= 2048:
            raise ConfigError(f"bucket_megabytes must be 1 to 2048, got {self.bucket_megabytes}")


class NCCLChannel(ChannelAdapter):
    """See WeightChannel. Stores folders as FilesChannel does, and has a sender."""

    options_type = Options
    takes_parts = True
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
        self._files = FilesChannel(directory, keep=keep, model_path=model_path)
        self._sender = Sender(host, bucket_bytes=bucket_bytes)

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        return self._files.publish(snapshot, incarnation=incarnation, policy_version=policy_version)

    def verify(self, weights: WeightVersion) -> Path:
        return self._files.verify(weights)

    @property
    def progress(self) -> int:
        return self._files.progress

    @property
    def published_bytes(self) -> int:
        return self._files.published_bytes

    @property
    def sender(self) -> Sender:
        return self._sender

    def receiver(self, intake: Intake, *, engine: str) -> CollectiveReceiver | None:
        if intake.collectives is None:
            return None
        return CollectiveReceiver(intake.collectives, engine=engine, num_ranks=intake.num_ranks)
