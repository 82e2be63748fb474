"""Stores weight versions in the run's object store, for hosts that share no disk with the learner.

Invariants (tests/contracts/test_weights.py, tests/unit/weights/objects/test_channel.py):
  C1 a version is announced only after everything it needs is stored. What a kept version needs is never removed.
  C2 a version's folder on a worker appears atomically, after its sha256 was verified.
  C3 a missing or corrupt object costs a longer route (an older base, the full version), but never yields wrong weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from asyncrl.bus.port import Bus, ObjectStore
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import BusError, ConfigError, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.adapter import ChannelAdapter
from asyncrl.weights.objects.fetched import FetchedVersions
from asyncrl.weights.objects.stored_file import StoredFile
from asyncrl.weights.objects.stored_parts import PartSettings, StoredParts, needed_names

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[weights.options] of the objects channel."""

    full_every: int = 16
    """Versions are stored as deltas from the previous one; every N-th is also stored in full."""
    delta_share: float = 0.5
    """A delta larger than this fraction of the full version is not stored; 0 stores only full versions."""

    def __post_init__(self) -> None:
        if self.full_every < 1:
            raise ConfigError(f"full_every must be > 0, got {self.full_every}")
        if not 0 <= self.delta_share <= 1:
            raise ConfigError(f"delta_share must be in [0, 1], got {self.delta_share}")


class ObjectsChannel(ChannelAdapter):
    """See WeightChannel. The learner writes folders as FilesChannel does, then stores full versions and deltas.

    directory   local folder; workers on one machine share the versions fetched into DIRECTORY/fetched
    keep        versions to keep in the store and in ``fetched``; everything that kept deltas need also stays, as do the
                deltas of ``full_every`` versions, for workers that have fallen behind
    full_every, delta_share  see Options
    """

    options_type = Options
    takes_parts = True
    ranks_use_bus = True

    @classmethod
    def build(cls, run: RunConfig, *, bus: Bus) -> ObjectsChannel:
        options: Options = cls.options(run)
        return cls(
            run.weights_directory,
            keep=run.weights.keep,
            model_path=Path(run.model.path),
            objects=bus.objects(),
            full_every=options.full_every,
            delta_share=options.delta_share,
        )

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        model_path: Path,
        objects: ObjectStore,
        full_every: int = 16,
        delta_share: float = 0.5,
    ) -> None:
        self._directory = directory.absolute()
        self._settings = PartSettings(
            directory=str(self._directory),
            keep=keep,
            full_every=full_every,
            delta_share=delta_share,
            opens=objects.elsewhere[0],
            address=objects.elsewhere[1],
        )
        self._whole = StoredFile(
            directory,
            number=0,
            keep=keep,
            model_path=model_path,
            objects=objects,
            full_every=full_every,
            delta_share=delta_share,
        )
        self._parts = StoredParts(self._settings, objects)
        self._fetched = FetchedVersions(directory / "fetched", keep=keep, model_path=model_path, objects=objects)
        self._objects = objects
        self._retained: dict[tuple[int, int], set[str]] = {}
        self._is_in_parts = False
        self.published_bytes = 0

    @property
    def progress(self) -> int:
        return self._whole.progress + self._parts.progress + self._fetched.progress

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version and remove old ones. Raises WeightsError if it cannot be stored."""
        self._is_in_parts = bool(snapshot.others)
        retained = self._retained_names
        try:
            if self._is_in_parts:
                version = self._parts.store(snapshot, incarnation=incarnation, policy_version=policy_version)
                self._parts.collect(snapshot, retained=retained)
                self.published_bytes = self._parts.published_bytes
                return version
            before = self._whole.stored_bytes
            version = self._whole.store(snapshot, incarnation=incarnation, policy_version=policy_version)
            self._whole.collect(retained=retained)
            self.published_bytes = self._whole.stored_bytes - before
        except BusError as error:
            raise WeightsError(f"cannot store weights {incarnation}-{policy_version}: {error}") from error
        return version

    def restore(self) -> WeightVersion | None:
        """If an object of the newest version is missing, store the version in full from the writer's folder.

        Raises WeightsError if the folder's files are lost as well. The next version is then stored in full.
        """
        if self._is_in_parts:
            return self._parts.restore()
        restored = self._whole.restore()
        if restored is not None:
            self._whole.collect(retained=self._retained_names)
        return restored

    @property
    def _retained_names(self) -> set[str]:
        return set[str]().union(*tuple(self._retained.values()))

    def verify(self, weights: WeightVersion) -> Path:
        """Return the folder of a version; fetch the version if this machine does not have it. Raises WeightsError."""
        return self._fetched.folder(weights)

    def retain(self, weights: WeightVersion) -> None:
        """Keep every object that the version's description names, if it still exists."""
        try:
            self._retained[weights.order] = needed_names(self._objects, weights.uri)
        except (BusError, WeightsError) as error:
            log.warning("weights %s: not kept for an evaluation: %s", weights.uri, error)

    def release(self, weights: WeightVersion) -> None:
        self._retained.pop(weights.order, None)
