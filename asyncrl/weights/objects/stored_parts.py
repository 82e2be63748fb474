"""Stores weight versions in parts: every rank of the learner stores its own part in the object store.

Each part is a file with its own deltas (stored_file.py). An object stored last holds the index of the folder that the
parts form. Before that object is stored, the version is not announced and nothing older is removed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.bus.port import ObjectStore
from asyncrl.errors import WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.messages.codec import decode, encode
from asyncrl.tensors import weight_files
from asyncrl.tensors.parts import on_every_part
from asyncrl.tensors.snapshot import PartWorker, Snapshot
from asyncrl.tensors.weight_files import WeightFile
from asyncrl.weights.objects import chain
from asyncrl.weights.objects.stored_file import StoredFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """Settings of StoredFile in every rank.  opens, address: see ObjectStore.elsewhere"""

    directory: str
    keep: int
    full_every: int
    delta_share: float
    opens: str
    address: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder:
    """An order to a rank.

    kind      store, restore or collect
    number    number of the part, from 1
    retained  objects that must not be removed
    """

    kind: str
    number: int
    settings: PartSettings
    incarnation: int = 0
    policy_version: int = 0
    retained: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A rank's answer.

    uri           object that describes the part's newest version
    objects       all objects that the version needs
    stored_bytes  bytes stored by this rank so far
    """

    uri: str = ""
    sha256: str = ""
    num_bytes: int = 0
    names: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    stored_bytes: int = 0


class PartStorer(PartWorker):
    """Stores the part of one rank, in that rank's process."""

    def __init__(self, objects: ObjectStore | None = None) -> None:
        """``objects``: our object store, if this process has a bus"""
        self._objects = objects
        self._lock = threading.Lock()
        self._file: StoredFile | None = None

    @property
    def progress(self) -> int:
        return self._file.progress if self._file else 0

    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        told = decode(order, PartOrder)
        with self._lock:
            file = self._opened(told)
        if told.kind == "collect":
            file.collect(retained=told.retained)
            return encode(StoredPart())
        if told.kind == "restore":
            version = file.restore()
        else:
            own = replace(snapshot, others=())
            version = file.store(own, incarnation=told.incarnation, policy_version=told.policy_version)
        if version is None:
            return encode(StoredPart())
        stored = StoredPart(
            uri=version.uri,
            sha256=version.sha256,
            num_bytes=version.num_bytes,
            names=tuple(entry.name for entry in snapshot.entries),
            objects=tuple(sorted(file.names)),
            stored_bytes=file.stored_bytes,
        )
        return encode(stored)

    def _opened(self, told: PartOrder) -> StoredFile:
        if self._file is None:
            settings = told.settings
            directory = Path(settings.directory) / f"part-{told.number}"
            directory.mkdir(parents=True, exist_ok=True)
            self._file = StoredFile(
                directory,
                number=told.number,
                keep=settings.keep,
                model_path=directory,  # without config and tokenizer: no engine loads a model from there
                objects=self._objects or _opened(settings),
                full_every=settings.full_every,
                delta_share=settings.delta_share,
            )
        return self._file


class StoredParts:
    """The learner's end: sends orders to the ranks, and writes the index."""

    def __init__(self, settings: PartSettings, objects: ObjectStore) -> None:
        self._settings, self._objects = settings, objects
        self._worker = PartStorer(objects)
        self._snapshot: Snapshot | None = None  # the newest; gives access to its ranks
        self._version = WeightVersion(incarnation=0, policy_version=0)
        self._parts: list[StoredPart] = []
        self._indices: list[tuple[int, int]] = []
        self.published_bytes = 0

    @property
    def progress(self) -> int:
        """Progress of our own part."""
        return self._worker.progress

    def store(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        """Store one version. Raises WeightsError, BusError."""
        if self._snapshot is None:
            self._objects.names()  # creates the store and removes a killed writer's leftovers before any rank writes
        order = self._order("store", incarnation=incarnation, policy_version=policy_version)
        parts = self._told(snapshot, order)
        total = sum(part.stored_bytes for part in parts)
        self.published_bytes = total - sum(part.stored_bytes for part in self._parts)
        self._snapshot, self._parts = snapshot, parts
        return self._write_index(incarnation=incarnation, policy_version=policy_version)

    def collect(self, snapshot: Snapshot, *, retained: Collection[str]) -> None:
        """Remove objects that no kept version needs. Raises BusError."""
        self._told(snapshot, self._order("collect", retained=retained))
        kept = [chain.index_name(*order) for order in self._indices[-self._settings.keep :]]
        for name in self._objects.names() - set(retained):
            part = chain.part_of(name)
            is_of_another_layout = part is not None and not 1 <= part <= len(self._parts)
            if is_of_another_layout or (part is None and name not in kept):
                self._objects.remove(name)

    def restore(self) -> WeightVersion | None:
        """Store missing objects of the newest version again. Return the version if any were missing, else None.

        Raises WeightsError, BusError.
        """
        if self._snapshot is None:
            return None
        there = self._objects.whole()
        are_whole = [set(part.objects) <= there for part in self._parts]
        if all(are_whole) and self._version.uri in there:
            return None
        if not all(are_whole):
            found = self._told(self._snapshot, self._order("restore"))
            self._parts = [after if after.uri else before for before, after in zip(self._parts, found, strict=True)]
        return self._write_index(incarnation=self._version.incarnation, policy_version=self._version.policy_version)

    def _write_index(self, *, incarnation: int, policy_version: int) -> WeightVersion:
        files = [
            WeightFile(
                file=weight_files.file_name(number, len(self._parts)),
                sha256=part.sha256,
                num_bytes=part.num_bytes,
                names=part.names,
            )
            for number, part in enumerate(self._parts)
        ]
        index, name = weight_files.index_of(files), chain.index_name(incarnation, policy_version)
        metadata = {
            "parts": json.dumps([part.uri for part in self._parts]),
            "objects": json.dumps(sorted({one for part in self._parts for one in part.objects})),
        }
        self._objects.put(name, [index], metadata=metadata)
        self._indices = [
            *(one for one in self._indices if one != (incarnation, policy_version)),
            (incarnation, policy_version),
        ]
        self._version = WeightVersion(
            incarnation=incarnation,
            policy_version=policy_version,
            uri=name,
            sha256=hashlib.sha256(index).hexdigest(),
            num_bytes=sum(one.num_bytes for one in files),
        )
        return self._version

    def _order(
        self, kind: str, *, incarnation: int = 0, policy_version: int = 0, retained: Collection[str] = ()
    ) -> PartOrder:
        return PartOrder(
            kind=kind,
            number=0,
            settings=self._settings,
            incarnation=incarnation,
            policy_version=policy_version,
            retained=tuple(sorted(retained)),
        )

    def _told(self, snapshot: Snapshot, order: PartOrder) -> list[StoredPart]:
        if not self._settings.opens:
            raise WeightsError("this bus is in one process: other ranks of the learner cannot store their parts there")
        orders = [encode(replace(order, number=1 + number)) for number in range(1 + len(snapshot.others))]
        return [decode(answer, StoredPart) for answer in on_every_part(snapshot, self._worker, orders)]


def needed_names(objects: ObjectStore, uri: str) -> set[str]:
    """Names of all objects from which a version can be fetched; empty if it is gone. Raises BusError, WeightsError."""
    info = objects.info(uri)
    if info is None:
        return set()
    if chain.part_of(uri) is None:
        return {uri, *map(str, json.loads(info.metadata.get("objects", "[]")))}
    return chain.names(chain.from_text(info.metadata.get("chain", "[]")))


def _opened(settings: PartSettings) -> ObjectStore:
    module, _, name = settings.opens.partition(":")
    store: ObjectStore = getattr(importlib.import_module(module), name)(settings.address)
    return store
