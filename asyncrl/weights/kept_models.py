"""Keeps some versions permanently, as model folders for evaluation, serving, or as a start for other runs."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.files import FilesChannel


class KeptModels:
    """Every N-th version, in DIRECTORY/INCARNATION-POLICY_VERSION.

    If that version is skipped because publishing is slower than a step, the next published one is kept instead.
    """

    def __init__(self, directory: Path, *, every: int, model_path: Path, quantization: str = "") -> None:
        """``every``: keep one version of this many; > 0."""
        self._folders = FilesChannel(directory, keep=sys.maxsize, model_path=model_path, quantization=quantization)
        self._directory = directory
        self._every = every
        self._before = -1  # version published or passed over before; -1: none yet

    @property
    def progress(self) -> int:
        """See WeightChannel."""
        return self._folders.progress

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> None:
        """Keep a version if it is due. Call it for each that is stored. Raises WeightsError if it cannot be written."""
        if self.is_due(policy_version):
            self._folders.publish(snapshot, incarnation=incarnation, policy_version=policy_version)
        self._before = policy_version

    def is_due(self, policy_version: int) -> bool:
        if not policy_version:
            return False
        if self._before < 0:  # an incarnation's first version: as after itself if already kept, else after one less
            is_kept = any(self._directory.glob(f"*-{policy_version}"))
            self._before = policy_version if is_kept else policy_version - 1
        return policy_version // self._every > self._before // self._every
