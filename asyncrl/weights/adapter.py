"""Bases of weight channels, and the receiver of channels whose engines fetch. weights/port.py specifies them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from asyncrl.bus.port import Bus
from asyncrl.config.adapter import Adapter, RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages import WeightVersion
from asyncrl.messages.weight_transfer import TransferRequest
from asyncrl.tensors import weight_files
from asyncrl.weights.port import Ask, LoadReport, Receiver, Sender, Source, WeightChannel, WeightUpdater


def verify_folder(weights: WeightVersion) -> Path:
    """Return the folder of a version after checking sizes and checksums. Raises WeightsError."""
    folder = Path(weights.uri)
    weight_files.verify(folder, sha256=weights.sha256, num_bytes=weights.num_bytes)
    return folder


class ChannelAdapter(Adapter):
    """Defaults for a channel that stores folders in weights.directory."""

    section: ClassVar[str] = "weights"

    takes: ClassVar[frozenset[str]] = frozenset()
    """What the channel can store besides whole models as trained: "adapters" (learner.lora.publish), and
    values of weights.quantization."""

    sends_from_memory: ClassVar[bool] = False
    """Whether engines get versions from the learner's memory, which needs both to be up at the same time."""

    takes_parts: ClassVar[bool] = False
    """Whether the channel carries models that several ranks of the learner export in parts (tensors/snapshot.py)."""

    @classmethod
    def check(cls, run: RunConfig) -> None:
        super().check(run)
        exporters = run.learner.layout.exporters
        if exporters > 1 and not cls.takes_parts:
            raise ConfigError(
                f'weights.channel: "{run.weights.channel}" carries models that one rank exports, but {exporters} ranks '
                "of this learner export parts; use another channel, or tensor_, pipeline_ and expert_parallel = 1"
            )

    @classmethod
    def build(cls, run: RunConfig, *, bus: Bus) -> WeightChannel:
        """Build the learner's end or a worker's end; both are built the same way."""
        options = {} if cls.options_type is None else {"options": cls.options(run)}
        return cast(Any, cls)(  # type: ignore[no-any-return]
            run.weights_directory, keep=run.weights.keep, model_path=Path(run.model.path), **options
        )

    @classmethod
    def learner_environment(cls, run: RunConfig) -> Mapping[str, str]:
        """Environment variables to set in the learner's process unless already set."""
        return {}

    def must_store(self, policy_version: int) -> bool:
        """See WeightChannel. A channel whose engines need no folder as long as they reach the learner returns False."""
        return True

    def verify(self, weights: WeightVersion) -> Path:
        return verify_folder(weights)

    def retain(self, weights: WeightVersion) -> None:
        """See WeightChannel. A channel that keeps every version for the length of an evaluation may do nothing."""

    def release(self, weights: WeightVersion) -> None:
        """See WeightChannel."""

    @property
    def sender(self) -> Sender | None:
        """See WeightChannel."""
        return None

    def receiver(self, updater: WeightUpdater, *, engine: str) -> Receiver | None:
        """See WeightChannel. A channel that sends from memory returns its Sender's counterpart, or PullReceiver."""
        return None


class PullReceiver:
    """The engine's end of a channel whose engines fetch the weights with a function that runs next to the model.

    See Receiver in weights/port.py. No join is needed: each offer's payload contains everything.
    """

    def __init__(self, updater: WeightUpdater, source: Source, *, engine: str) -> None:
        """``source``: see WeightUpdater.update. ``engine``: name of the engine in the run."""
        self._updater = updater
        self._source = source
        self._engine = engine

    async def join(self, ask: Ask) -> None:
        """Do nothing: no connection is kept."""

    async def receive(self, ask: Ask) -> LoadReport:
        request = TransferRequest(
            engine=self._engine, group=self._engine, num_ranks=self._updater.num_ranks, has_joined=True
        )
        offer = await ask(request)
        return await self._updater.update(offer.version, self._source, offer.payload)
