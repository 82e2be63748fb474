"""Keeps some versions permanently, as model folders for evaluation, serving, or as a start for other runs."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.port import Receiver, Sender, WeightChannel, WeightUpdater


class ModelKeeper:
    """Wraps a channel and keeps every N-th version permanently in DIRECTORY/INCARNATION-POLICY_VERSION.

    If that version is skipped because publishing is slower than a step, the next published one is kept instead.
    """

    def __init__(
        self, channel: WeightChannel, directory: Path, *, every: int, model_path: Path, quantization: str = ""
    ) -> None:
        """``every``: keep one version of this many; > 0."""
        self._channel = channel
        self._models = FilesChannel(directory, keep=sys.maxsize, model_path=model_path, quantization=quantization)
        self._directory = directory
        self._every = every
        self._before = -1  # version published or passed over before; -1: none yet
        self._stored: WeightVersion | None = None  # stored by the channel, but not yet as a model

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Publish through the channel, then keep the model if due. Raises WeightsError if it cannot be written."""
        published = self._stored
        if published is None or published.version != (incarnation, policy_version):
            published = self._channel.publish(snapshot, incarnation=incarnation, policy_version=policy_version)
            self._stored = published
        if self._is_due(policy_version):
            self._models.publish(snapshot, incarnation=incarnation, policy_version=policy_version)
        self._before = policy_version
        self._stored = None
        return published

    def must_store(self, policy_version: int) -> bool:
        return self._channel.must_store(policy_version) or self._is_due(policy_version)

    def _is_due(self, policy_version: int) -> bool:
        if not policy_version:
            return False
        if self._before < 0:  # an incarnation's first version: as after itself if already kept, else after one less
            is_kept = any(self._directory.glob(f"*-{policy_version}"))
            self._before = policy_version if is_kept else policy_version - 1
        return policy_version // self._every > self._before // self._every

    def verify(self, weights: WeightVersion) -> Path:
        return self._channel.verify(weights)

    def retain(self, weights: WeightVersion) -> None:
        self._channel.retain(weights)

    def release(self, weights: WeightVersion) -> None:
        self._channel.release(weights)

    @property
    def progress(self) -> int:
        return self._channel.progress + self._models.progress

    @property
    def published_bytes(self) -> int:
        return self._channel.published_bytes

    @property
    def sender(self) -> Sender | None:
        return self._channel.sender

    def receiver(self, updater: WeightUpdater, *, engine: str) -> Receiver | None:
        return self._channel.receiver(updater, engine=engine)
