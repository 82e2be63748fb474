"""Weight versions through the run's object store, for hosts that share no disk with the learner.

Invariants (tests/test_weights_contract.py, tests/test_weights_objects.py):
  C1 a version is announced once all that it needs is stored; what a kept version needs is never collected.
  C2 a worker's folder of a version is there whole or not at all, and was checked against the published sha256.
  C3 an object that is gone or wrong costs a longer way (an older base, the whole version), never wrong weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np

from asyncrl import safetensors_file
from asyncrl.errors import BusError, WeightsError
from asyncrl.messages import WeightVersion, replace
from asyncrl.protocols import ObjectStore
from asyncrl.snapshot import Snapshot
from asyncrl.weights import chain, delta
from asyncrl.weights.chain import Chain, Link
from asyncrl.weights.fetched import FetchedVersions
from asyncrl.weights.files import WEIGHTS_FILE, FilesChannel

_LOCAL_VERSIONS: Final = 2
"""On the learner's disk: the newest, and the one before that its delta is made from."""
_BLOCK_BYTES: Final = 2**20


class ObjectsChannel:
    """See WeightChannel. The learner writes folders as FilesChannel does, then what workers need of them to the store.

    directory   of this machine; workers keep what they fetched in DIRECTORY/fetched, once for all on their machine
    keep        versions kept in the store and in ``fetched``; what deltas of kept ones need stays as well, and the
                deltas of ``full_every`` versions, for who has fallen behind
    full_every, delta_share  as in the run file
    """

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
        self._stored_bytes = 0
        self.published_bytes = 0

    @property
    def sender(self) -> None:
        """Nothing is sent: engines read what their worker fetched."""
        return None

    @property
    def progress(self) -> int:
        return self._files.progress + self._stored_bytes + self._fetched.progress

    def publish(self, snapshot: Snapshot, *, run_epoch: int, policy_version: int) -> WeightVersion:
        """Store one version and collect old ones. Raises WeightsError when it cannot be stored."""
        version = self._files.publish(snapshot, run_epoch=run_epoch, policy_version=policy_version)
        before = self._stored_bytes
        try:
            self._chain = self._store(snapshot, version)
        except (BusError, OSError) as error:
            raise WeightsError(f"cannot store weights {run_epoch}-{policy_version}: {error}") from error
        self.published_bytes = self._stored_bytes - before
        return replace(version, uri=self._chain[-1].uri)  # type: ignore[no-any-return]

    def verify(self, weights: WeightVersion) -> Path:
        """The folder of a version, fetched if this machine has it not yet. Raises WeightsError."""
        return self._fetched.folder(weights)

    def _store(self, snapshot: Snapshot, version: WeightVersion) -> Chain:
        """The chain with this version, once everything that it names is stored."""
        before = self._chain if self._chain and self._chain[-1].order < version.order else ()
        if before and before[-1].run_epoch != version.run_epoch:
            before = ()  # another history
        with tempfile.TemporaryFile(dir=self._directory) as changes:
            delta_bytes = self._write_delta(changes, before[-1], version, snapshot) if before else 0
            is_whole = not delta_bytes or chain.is_full_due(before, every=self._full_every)
            link = Link(
                run_epoch=version.run_epoch,
                policy_version=version.policy_version,
                sha256=version.sha256,
                full=version.num_bytes if is_whole else 0,
                delta=delta_bytes,
            )
            links = chain.grown(before, link, keep=self._keep, behind=self._full_every)
            metadata = {"chain": chain.to_text(links)}
            if link.full:
                with self._file(link).open("rb") as whole:
                    self._objects.put(link.full_name, self._blocks(whole), metadata=metadata)
            if link.delta:
                changes.seek(0)
                self._objects.put(link.delta_name, self._blocks(changes), metadata=metadata)
        for name in self._objects.names() - chain.names(links):
            self._objects.remove(name)
        return links

    def _write_delta(self, stream: IO[bytes], old: Link, new: WeightVersion, snapshot: Snapshot) -> int:
        """Its size; 0 when there is none that is worth it."""
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
