"""Stores weight versions in the run's object store, for hosts that share no disk with the learner.

Invariants (tests/contracts/test_weights.py, tests/unit/weights/test_objects_channel.py):
  C1 a version is announced only after everything it needs is stored. What a kept version needs is never removed.
  C2 a version's folder on a worker appears atomically, after its sha256 was verified.
  C3 a missing or corrupt object costs the full version instead of a delta, but never yields wrong weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final

import numpy as np

from asyncrl.bus.port import Bus, ObjectStore
from asyncrl.config.adapter import RunConfig
from asyncrl.config.checks import Positive, Range
from asyncrl.errors import BusError, WeightsError
from asyncrl.images.store import PREFIX as OF_IMAGES
from asyncrl.messages import WeightVersion, replace
from asyncrl.tensors import safetensors_file, weight_files
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights import delta
from asyncrl.weights.adapter import ChannelAdapter
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.stored_versions import Description, FetchedVersions, Link

_LOCAL_VERSIONS: Final = 2
"""Versions in the learner's folder: the newest, and the previous one, from which its delta is made."""
_BLOCK_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[weights.options] of the objects channel."""

    full_every: Positive[int] = 16
    """Versions are stored as deltas from the previous one; every N-th is also stored in full."""
    delta_share: Annotated[float, Range(low=0, high=1)] = 0.5
    """A delta larger than this fraction of the full version is not stored; 0 stores only full versions."""


class ObjectsChannel(ChannelAdapter):
    """See WeightChannel. The learner writes folders as FilesChannel does, then stores their files in full or as deltas.

    directory   folder of the learner, which all of its machines share; workers on one machine share the versions
                fetched into DIRECTORY/fetched
    keep        versions to keep in the store and in ``fetched``; all objects of their chains stay
    full_every, delta_share  see Options
    """

    options_type = Options
    takes_parts = True

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
        self._files = FilesChannel(directory, keep=_LOCAL_VERSIONS, model_path=model_path)
        self._fetched = FetchedVersions(directory / "fetched", keep=keep, model_path=model_path, objects=objects)
        self._directory = directory.absolute()
        self._objects = objects
        self._keep = max(keep, 1)
        self._full_every = full_every
        self._delta_share = delta_share
        self._stored: dict[tuple[int, int], Description] = {}  # of this process, the newest last
        self._retained: set[tuple[int, int]] = set()
        self._stored_bytes = 0
        self.published_bytes = 0

    @property
    def progress(self) -> int:
        return self._files.progress + self._stored_bytes + self._fetched.progress

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version and remove old ones. Raises WeightsError if it cannot be stored."""
        version = self._files.publish(snapshot, incarnation=incarnation, policy_version=policy_version)
        before = self._stored_bytes
        try:
            description = self._store(version)
            self._stored.pop(version.version, None)
            self._stored[version.version] = description
            self._collect()
        except (BusError, OSError) as error:
            raise WeightsError(f"cannot store weights {incarnation}-{policy_version}: {error}") from error
        self.published_bytes = self._stored_bytes - before
        announced: WeightVersion = replace(version, uri=description.newest.uri)
        return announced

    def verify(self, weights: WeightVersion) -> Path:
        """Return the folder of a version; fetch the version if this machine does not have it. Raises WeightsError."""
        return self._fetched.folder(weights)

    def retain(self, weights: WeightVersion) -> None:
        self._retained.add(weights.version)

    def release(self, weights: WeightVersion) -> None:
        self._retained.discard(weights.version)

    def _store(self, version: WeightVersion) -> Description:
        """Store a version whose folder is written, as a delta, in full, or both."""
        folder = Path(version.uri)
        files = tuple((path.name, path.stat().st_size) for path in _weight_files(folder))
        size = sum(num_bytes for _, num_bytes in files)
        previous = next(reversed(self._stored.values()), None)
        if previous is not None and (previous.files != files or not previous.newest.precedes(version.version)):
            previous = None  # other tensors, or another history
        with tempfile.TemporaryFile(dir=self._directory) as changes:
            delta_bytes = self._write_delta(changes, previous.newest, folder) if previous is not None else 0
            is_full = previous is None or not delta_bytes or previous.is_full_due(every=self._full_every)
            link = Link(
                incarnation=version.incarnation,
                policy_version=version.policy_version,
                sha256=version.sha256,
                full=size if is_full else 0,
                delta=delta_bytes,
            )
            description = (previous or Description(files=files, links=())).grown(link)
            metadata = {"description": description.text}
            if is_full:
                for number, (name, _) in enumerate(files):
                    with (folder / name).open("rb") as stream:
                        self._objects.put(link.full_name(number), self._blocks(stream), metadata=metadata)
            if delta_bytes:
                changes.seek(0)
                self._objects.put(link.delta_name, self._blocks(changes), metadata=metadata)
        return description

    def _write_delta(self, stream: IO[bytes], old: Link, folder: Path) -> int:
        """Write the delta from ``old`` to the version in ``folder``. Return its size; 0 if it is not worth storing."""
        pairs = [(self._directory / old.name / path.name, path) for path in _weight_files(folder)]
        if not all(before.exists() and before.stat().st_size == path.stat().st_size for before, path in pairs):
            return 0  # somebody removed the previous version from the folder
        most = self._delta_share * sum(path.stat().st_size for _, path in pairs)
        num_bytes = 0
        for block in delta.encode(
            (np.memmap(before, mode="r"), np.memmap(path, mode="r"), _sections(path)) for before, path in pairs
        ):
            num_bytes += len(block)
            if num_bytes > most:
                return 0
            stream.write(block)
        return num_bytes

    def _collect(self) -> None:
        """Remove objects that neither the newest ``keep`` versions nor retained ones need. Raises BusError."""
        newest = list(self._stored)[-self._keep :]
        self._stored = {version: one for version, one in self._stored.items() if version in {*newest, *self._retained}}
        needed = set[str]().union(*(description.objects for description in self._stored.values()))
        for name in self._objects.names() - needed:
            if not name.startswith(OF_IMAGES):
                self._objects.remove(name)

    def _blocks(self, stream: IO[bytes]) -> Iterator[bytes]:
        while block := stream.read(_BLOCK_BYTES):
            yield block
            self._stored_bytes += len(block)


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a version in their order in deltas, with their index."""
    return sorted(path for path in folder.iterdir() if weight_files.is_weight_file(path.name))


def _sections(path: Path) -> list[delta.Section]:
    if path.name == weight_files.INDEX_FILE:
        return [(0, path.stat().st_size, 1)]
    with path.open("rb") as stream:
        entries, header_bytes = safetensors_file.read_header(stream)
    return safetensors_file.sections(entries, header_bytes=header_bytes)
