"""One weight file in the object store: a whole model, or the part that one rank of the learner exports.

Every version is stored as a delta from the previous one, in full, or both (chain.py).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np

from asyncrl.bus.port import ObjectStore
from asyncrl.errors import BusError, WeightsError
from asyncrl.messages import WeightVersion, replace
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.tensors.weight_files import WEIGHTS_FILE
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.objects import chain, delta
from asyncrl.weights.objects.chain import Chain, Link

log = logging.getLogger("asyncrl.learner")

_LOCAL_VERSIONS: Final = 2
"""Versions on the learner's disk: the newest, and the previous one, from which its delta is made."""
_BLOCK_BYTES: Final = 2**20


class StoredFile:
    """Writes the versions of one file.

    directory   local folder
    number      number of the part of the model, from 1; 0: the whole model
    keep        versions to keep in the store; everything that kept deltas need also stays, as do the deltas of
                ``full_every`` versions, for workers that have fallen behind
    full_every, delta_share  see channel.Options
    """

    def __init__(
        self,
        directory: Path,
        *,
        number: int,
        keep: int,
        model_path: Path,
        objects: ObjectStore,
        full_every: int,
        delta_share: float,
    ) -> None:
        self._directory = directory.absolute()
        self._files = FilesChannel(directory, keep=_LOCAL_VERSIONS, model_path=model_path)
        self._number = number
        self._objects = objects
        self._keep, self._full_every, self._delta_share = keep, full_every, delta_share
        self._chain: Chain = ()
        self._is_broken = False  # whether an object that the chain needs is missing
        self._published = WeightVersion(incarnation=0, policy_version=0)  # the newest, once the chain is not empty
        self._stored_bytes = 0

    @property
    def progress(self) -> int:
        return self._files.progress + self._stored_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes stored so far, over all versions."""
        return self._stored_bytes

    @property
    def names(self) -> set[str]:
        """Names of the objects that the newest version needs."""
        return chain.names(self._chain)

    def store(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version. Older ones stay until ``collect``. Raises WeightsError if it cannot be stored."""
        version = self._files.publish(snapshot, incarnation=incarnation, policy_version=policy_version)
        try:
            self._chain = self._store(snapshot, version)
            self._is_broken = False
        except (BusError, OSError) as error:
            raise WeightsError(f"cannot store weights {incarnation}-{policy_version}: {error}") from error
        self._published = replace(version, uri=self._chain[-1].uri)
        return self._published

    def restore(self) -> WeightVersion | None:
        """If an object of the newest version is missing, store the version in full from the learner's own folder.

        Raises WeightsError if the folder's files are lost as well. The next version is then stored in full.
        """
        if not self._chain or self.names <= self._objects.whole():
            return None
        self._is_broken = True
        self._files.restore()
        newest, size = self._chain[-1], self._published.num_bytes
        link = Link(
            incarnation=newest.incarnation,
            policy_version=newest.policy_version,
            sha256=newest.sha256,
            full=size,
            part=self._number,
        )
        try:
            if safetensors_file.sha256(self._file(link)) != link.sha256:
                raise WeightsError(f"weights {link.name} are gone from the object store, and damaged in its folder")
            self._put_whole(link, (link,))
        except OSError as error:
            raise WeightsError(
                f"weights {link.name} are gone from the object store, and cannot be stored again: {error}"
            ) from error
        self._chain, self._is_broken = (link,), False
        log.warning("weights %s were gone from the object store: stored again, %s bytes", link.name, f"{size:,}")
        self._published = replace(self._published, uri=link.uri)
        return self._published

    def collect(self, *, retained: Collection[str]) -> None:
        """Remove objects that the newest versions do not need and that are not ``retained``. Raises BusError."""
        for name in self._objects.names() - self.names - set(retained):
            if not self._number or chain.part_of(name) == self._number:
                self._objects.remove(name)

    def _store(self, snapshot: Snapshot, version: WeightVersion) -> Chain:
        """Store this version. Return the chain that ends with it."""
        before = self._chain if self._chain and self._chain[-1].order < version.order else ()
        if before and (self._is_broken or before[-1].incarnation != version.incarnation):
            before = ()  # no usable base, or another history
        with tempfile.TemporaryFile(dir=self._directory) as changes:
            delta_bytes = self._write_delta(changes, before[-1], version, snapshot) if before else 0
            is_whole = not delta_bytes or chain.is_full_due(before, every=self._full_every)
            link = Link(
                incarnation=version.incarnation,
                policy_version=version.policy_version,
                sha256=version.sha256,
                full=version.num_bytes if is_whole else 0,
                delta=delta_bytes,
                part=self._number,
            )
            links = chain.grown(before, link, keep=self._keep, behind=self._full_every)
            metadata = {"chain": chain.to_text(links)}
            if link.full:
                self._put_whole(link, links)
            if link.delta:
                changes.seek(0)
                self._objects.put(link.delta_name, self._blocks(changes), metadata=metadata)
        return links

    def _put_whole(self, link: Link, links: Chain) -> None:
        with self._file(link).open("rb") as whole:
            self._objects.put(link.full_name, self._blocks(whole), metadata={"chain": chain.to_text(links)})

    def _write_delta(self, stream: IO[bytes], old: Link, new: WeightVersion, snapshot: Snapshot) -> int:
        """Write the delta. Return its size; 0 if it is not worth storing."""
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
        return self._directory / f"{link.incarnation}-{link.policy_version}" / WEIGHTS_FILE

    def _blocks(self, stream: IO[bytes]) -> Iterator[bytes]:
        while block := stream.read(_BLOCK_BYTES):
            yield block
            self._stored_bytes += len(block)
