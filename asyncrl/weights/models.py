"""Versions that stay: model folders to evaluate, to serve, to start from, whatever a channel keeps of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.messages import WeightVersion
from asyncrl.protocols import Sender, WeightChannel
from asyncrl.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel


class WithModels:
    """Another channel, which keeps every so many-th version in DIRECTORY/RUN_EPOCH-POLICY_VERSION for good.

    Of versions that are passed over because publishing is slower than a step, the next one that is published stays.
    """

    def __init__(self, channel: WeightChannel, directory: Path, *, every: int, model_path: Path) -> None:
        """``every``: versions from one that stays to the next, > 0."""
        self._channel = channel
        self._models = FilesChannel(directory, keep=sys.maxsize, model_path=model_path, links=False)
        self._directory = directory
        self._every = every
        self._published = -1

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        """The channel's, and then the model; WeightsError when that cannot be written."""
        published = self._channel.publish(snapshot, run_epoch=run_epoch, policy_version=policy_version)
        if policy_version and policy_version // self._every > self._before(policy_version) // self._every:
            self._models.publish(snapshot, run_epoch=run_epoch, policy_version=policy_version)
        self._published = policy_version
        return published

    def _before(self, policy_version: int) -> int:
        """The version published before. Of a life's first, which a checkpoint brought back: itself if it stays."""
        if self._published >= 0:
            return self._published
        return policy_version if any(self._directory.glob(f"*-{policy_version}")) else policy_version - 1

    def verify(self, weights: WeightVersion) -> Path:
        return self._channel.verify(weights)

    @property
    def progress(self) -> int:
        return self._channel.progress + self._models.progress

    @property
    def published_bytes(self) -> int:
        return self._channel.published_bytes

    @property
    def sender(self) -> Sender | None:
        return self._channel.sender
