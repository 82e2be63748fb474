"""Weight versions in the run's object store, for hosts that share no disk with the learner.

Invariants (tests/contracts/test_weights.py, tests/unit/weights/objects/test_channel.py):
  C1 a version is announced only after everything it needs is stored; what a kept version needs is never removed.
  C2 a version's folder on a worker appears atomically, after its sha256 was verified.
  C3 a missing or corrupt object costs a longer route (an older base, the full version), never wrong weights.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import numpy as np

from asyncrl.errors import BusError, ConfigError, WeightsError
from asyncrl.messages import WeightVersion, replace
from asyncrl.protocols import Bus, ObjectStore
from asyncrl.protocols.adapter import RunConfig
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.adapter import ChannelAdapter
from asyncrl.weights.files import WEIGHTS_FILE, FilesChannel
from asyncrl.weights.objects import chain, delta
from asyncrl.weights.objects.chain import Chain, Link
from asyncrl.weights.objects.fetched import FetchedVersions

log = logging.getLogger("asyncrl.learner")

_LOCAL_VERSIONS: Final = 2
"""Versions on the learner's disk: the newest, and the previous one, from which its delta is made."""
_BLOCK_BYTES: Final = 2**20


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

    directory   local; workers on a machine share the versions fetched into DIRECTORY/fetched
    keep        versions kept in the store and in ``fetched``; everything that kept deltas need stays too, as do the
                deltas of ``full_every`` versions, for workers that have fallen behind
    full_every, delta_share  see Options
    """

    options_type = Options

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
        self._files = FilesChannel(directory, keep=_LOCAL_VERSIONS, model_path=model_path)
        self._fetched = FetchedVersions(directory / "fetched", keep=keep, model_path=model_path, objects=objects)
        self._objects = objects
        self._keep, self._full_every, self._delta_share = keep, full_every, delta_share
        self._chain: Chain = ()
        self._retained: dict[tuple[int, int], Chain] = {}
        self._is_broken = False  # something that the chain needs is gone
        self._published = WeightVersion(incarnation=0, policy_version=0)  # the newest, once there is a chain
        self._stored_bytes = 0
        self.published_bytes = 0

    @property
    def progress(self) -> int:
        return self._files.progress + self._stored_bytes + self._fetched.progress

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version and remove old ones. Raises WeightsError when it cannot be stored."""
        version = self._files.publish(snapshot, incarnation=incarnation, policy_version=policy_version)
        before = self._stored_bytes
        try:
            self._chain = self._store(snapshot, version)
            self._is_broken = False
        except (BusError, OSError) as error:
            raise WeightsError(f"cannot store weights {incarnation}-{policy_version}: {error}") from error
        self.published_bytes = self._stored_bytes - before
        self._published = replace(version, uri=self._chain[-1].uri)
        return self._published

    def restore(self) -> WeightVersion | None:
        """Of a version of which something is gone: stored in full, from the learner's own folder.

        Raises WeightsError when that is gone for good: the next version is stored in full, whatever it is a delta from.
        """
        if not self._chain or chain.names(self._chain) <= self._objects.whole():
            return None
        self._is_broken = True
        self._files.restore()
        newest, size = self._chain[-1], self._published.num_bytes
        link = Link(
            incarnation=newest.incarnation, policy_version=newest.policy_version, sha256=newest.sha256, full=size
        )
        try:
            if safetensors_file.sha256(self._file(link)) != link.sha256:
                raise WeightsError(f"weights {link.name} are gone from the object store, and damaged in its folder")
            self._put_whole(link, (link,))
            self._remove_others((link,))
        except OSError as error:
            raise WeightsError(
                f"weights {link.name} are gone from the object store, and cannot be stored again: {error}"
            ) from error
        self._chain, self._is_broken = (link,), False
        log.warning("weights %s were gone from the object store: stored again, %s bytes", link.name, f"{size:,}")
        self._published = replace(self._published, uri=link.uri)
        return self._published

    def verify(self, weights: WeightVersion) -> Path:
        """The folder of a version, fetched if it is not on this machine yet. Raises WeightsError."""
        return self._fetched.folder(weights)

    def retain(self, weights: WeightVersion) -> None:
        """Everything of the chain that its description names. One that is gone already is not kept."""
        try:
            info = self._objects.info(weights.uri)
            found = () if info is None else chain.from_text(info.metadata.get("chain", "[]"))
        except (BusError, WeightsError) as error:
            log.warning("weights %s: not kept for an evaluation: %s", weights.uri, error)
            return
        self._retained[weights.order] = found

    def release(self, weights: WeightVersion) -> None:
        self._retained.pop(weights.order, None)

    def _store(self, snapshot: Snapshot, version: WeightVersion) -> Chain:
        """Store this version; returns the chain that ends with it."""
        before = self._chain if self._chain and self._chain[-1].order < version.order else ()
        if before and (self._is_broken or before[-1].incarnation != version.incarnation):
            before = ()  # nothing to change, or another history
        with tempfile.TemporaryFile(dir=self._directory) as changes:
            delta_bytes = self._write_delta(changes, before[-1], version, snapshot) if before else 0
            is_whole = not delta_bytes or chain.is_full_due(before, every=self._full_every)
            link = Link(
                incarnation=version.incarnation,
                policy_version=version.policy_version,
                sha256=version.sha256,
                full=version.num_bytes if is_whole else 0,
                delta=delta_bytes,
            )
            links = chain.grown(before, link, keep=self._keep, behind=self._full_every)
            metadata = {"chain": chain.to_text(links)}
            if link.full:
                self._put_whole(link, links)
            if link.delta:
                changes.seek(0)
                self._objects.put(link.delta_name, self._blocks(changes), metadata=metadata)
        self._remove_others(links)
        return links

    def _put_whole(self, link: Link, links: Chain) -> None:
        with self._file(link).open("rb") as whole:
            self._objects.put(link.full_name, self._blocks(whole), metadata={"chain": chain.to_text(links)})

    def _remove_others(self, links: Chain) -> None:
        retained = [link for older in tuple(self._retained.values()) for link in older]
        for name in self._objects.names() - chain.names([*links, *retained]):
            self._objects.remove(name)

    def _write_delta(self, stream: IO[bytes], old: Link, new: WeightVersion, snapshot: Snapshot) -> int:
        """Returns the delta's size; 0 if it is not worth storing."""
        old_file, new_file = self._file(old), Path(new.uri) / WEIGHTS_FILE
        if not old_file.exists() or old_file.stat().st_size != new.num_bytes:
            return 0
        sections = safetensors_file.sections(snapshot.entries, header_bytes=new.num_bytes - snapshot.num_bytes)
        num_bytes = 0
        for block in delta.encode(np.memmap(old_file, mode="r"), np.memmap(new_file, mode="r"), sections=sections):
            num_bytes += len(block)
            if num_bytes > self._delta_share * new.num_bytes:
                return 0
            stream.write(block)
        return num_bytes

    def _file(self, link: Link) -> Path:
        return self._directory / link.name / WEIGHTS_FILE

    def _blocks(self, stream: IO[bytes]) -> Iterator[bytes]:
        while block := stream.read(_BLOCK_BYTES):
            yield block
            self._stored_bytes += len(block)
