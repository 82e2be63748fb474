"""Weight versions in the object store: full, as a delta from the version before, or both; and folders made from them.

    1.full   2.delta   3.delta   4.delta 4.full   5.delta
       └──────── chain of 3 ┘       └─── chain of 5 ─┘

A version is made from a base, that is a full version or one that a worker has, and all deltas after it. The object that
names a version (``Link.uri``) describes its chain: the versions since the last full one, and the one before that, so
that a worker which has it fetches one more delta instead of the full version.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from asyncrl.bus.port import ObjectStore
from asyncrl.errors import BusError, ObjectGone, WeightsError
from asyncrl.messages import WeightVersion
from asyncrl.weights import delta
from asyncrl.weights.adapter import verify_folder
from asyncrl.weights.files import add_companions

_TEMPORARY: Final = ".tmp-"
_LOOK_SECONDS: Final = 0.05
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version.  sha256: as announced.  full, delta: bytes of its objects; 0 if it is not stored like this"""

    incarnation: int
    policy_version: int
    sha256: str
    full: int = 0
    delta: int = 0

    @property
    def name(self) -> str:
        return f"{self.incarnation}-{self.policy_version}"

    @property
    def delta_name(self) -> str:
        return f"{self.name}.delta"

    def full_name(self, number: int) -> str:
        """Name of the object of weight file ``number``, from 0."""
        return f"{self.name}.full" if not number else f"{self.name}.{number}.full"

    def precedes(self, version: tuple[int, int]) -> bool:
        """Whether this is an earlier version of the same incarnation."""
        return self.incarnation == version[0] and self.policy_version < version[1]

    @property
    def uri(self) -> str:
        return self.delta_name if self.delta else self.full_name(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a worker must know to make a version.

    files  name and size of each weight file, in the order in which deltas count their bytes
    links  the chain, this version last
    """

    files: tuple[tuple[str, int], ...]
    links: tuple[Link, ...]

    @property
    def newest(self) -> Link:
        return self.links[-1]

    @property
    def objects(self) -> set[str]:
        """Names of all objects of the chain."""
        numbers = range(len(self.files))
        full = {link.full_name(number) for link in self.links if link.full for number in numbers}
        return full | {link.delta_name for link in self.links if link.delta}

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def is_full_due(self, *, every: int) -> bool:
        """Whether the next version is the ``every``-th since a full one."""
        return not any(link.full for link in (self.links[1 - every :] if every > 1 else ()))

    def grown(self, link: Link) -> Description:
        """Return the description of the next version. A full version begins a new chain."""
        if not link.full:
            return replace(self, links=(*self.links, link))
        before = (replace(self.newest, full=0, delta=0),) if link.delta else ()
        return replace(self, links=(*before, link))


def parse_description(text: str) -> Description:
    """Parse ``Description.text``. Raises WeightsError."""
    try:
        found = json.loads(text)
        files = tuple((str(name), int(size)) for name, size in found["files"])
        links: Sequence[Link] = tuple(Link(**fields) for fields in found["links"])
        if not files or not links or any("/" in name or name.startswith(".") for name, _ in files):
            raise ValueError("no files, no versions, or the name of a file is a path")
        return Description(files=files, links=tuple(links))
    except (ValueError, TypeError, KeyError) as error:
        raise WeightsError(f"cannot parse the description of a weight version: {error}") from error


class FetchedVersions:
    """Folders DIRECTORY/INCARNATION-POLICY_VERSION-SHA256. Any number of processes of one machine may share them."""

    def __init__(self, directory: Path, *, keep: int, model_path: Path, objects: ObjectStore) -> None:
        """``keep``: versions to keep. ``model_path``: folder whose config and tokenizer are added to every version."""
        self._directory = directory.absolute()
        self._keep = max(keep, 2)
        self._model_path = model_path
        self._objects = objects
        self.progress = 0

    def folder(self, weights: WeightVersion) -> Path:
        """Return the folder of a version. Fetch it if necessary, and verify its checksum. Raises WeightsError."""
        if not re.fullmatch("[0-9a-f]{64}", weights.sha256):
            raise WeightsError(f"weights {weights.uri!r}: {weights.sha256[:12]!r} is not a sha256")
        folder = self._directory / f"{weights.incarnation}-{weights.policy_version}-{weights.sha256[:_DIGITS]}"
        try:
            with self._alone():
                if folder.exists():
                    with contextlib.suppress(WeightsError):
                        return verify_folder(replace(weights, uri=str(folder)))
                    shutil.rmtree(folder)
                self._fetch(weights, folder)
                self._collect(fetched=weights.version)
        except OSError as error:
            raise WeightsError(f"{folder}: cannot keep fetched weights there: {error.strerror}") from error
        except BusError as error:
            raise WeightsError(f"weights {weights.uri}: {error}") from error
        return folder

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock out this machine's other processes. A process that waited finds what the other one fetched."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / ".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self.progress += 1  # if the other process hangs, that process must be reported as stuck
                    time.sleep(_LOOK_SECONDS)
            yield

    def _fetch(self, weights: WeightVersion, folder: Path) -> None:
        """Make a version from the newest one on this machine, or else from the full one, and rename it into place."""
        info = self._objects.info(weights.uri)
        if info is None:
            raise WeightsError(f"weights {weights.uri}: not found; removed for newer versions")
        description = parse_description(info.metadata.get("description", ""))
        if description.newest.sha256 != weights.sha256:
            raise WeightsError(
                f"weights {weights.uri}: sha256 {weights.sha256[:12]}... was announced, but others are stored there"
            )
        temporary = self._directory / f"{_TEMPORARY}{folder.name}"
        for path in self._directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)
        try:
            if not self._make_from_local(description, weights, temporary):
                self._make_from_full(description, weights, temporary)
            add_companions(temporary, self._model_path)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _make_from_local(self, description: Description, weights: WeightVersion, temporary: Path) -> bool:
        """Apply deltas to the newest version of the chain on this machine. Return False if that does not give it."""
        links = description.links
        at_hand = [number for number, link in enumerate(links) if self._path(link).exists()]
        if not at_hand:
            return False
        base = links[at_hand[-1]]
        temporary.mkdir()
        try:
            for name, _ in description.files:
                shutil.copyfile(self._path(base) / name, temporary / name)
            self._apply(description, links[at_hand[-1] + 1 :], temporary)
            verify_folder(replace(weights, uri=str(temporary)))
        except (WeightsError, ObjectGone, FileNotFoundError):  # a delta is gone or wrong, or the base is
            shutil.rmtree(temporary)
            return False
        return True

    def _make_from_full(self, description: Description, weights: WeightVersion, temporary: Path) -> None:
        """Fetch the full version of the chain and apply the deltas after it."""
        number = next((number for number, link in enumerate(description.links) if link.full), None)
        if number is None:
            raise WeightsError(f"weights {weights.uri}: stored only as a delta from a version that nobody has")
        temporary.mkdir()
        for index, (name, _) in enumerate(description.files):
            with (temporary / name).open("wb") as stream:
                for block in self._blocks(description.links[number].full_name(index)):
                    stream.write(block)
        self._apply(description, description.links[number + 1 :], temporary)
        verify_folder(replace(weights, uri=str(temporary)))

    def _apply(self, description: Description, links: Sequence[Link], folder: Path) -> None:
        """Apply the deltas of ``links`` to the weight files in ``folder``."""
        if not links:
            return
        paths = [folder / name for name, _ in description.files]
        if [path.stat().st_size for path in paths] != [num_bytes for _, num_bytes in description.files]:
            raise WeightsError(f"{folder}: weight files of other sizes than those the deltas were made for")
        files = [np.memmap(path, mode="r+") for path in paths]
        for link in links:
            delta.apply(files, self._blocks(link.delta_name))

    def _blocks(self, name: str) -> Iterator[bytes]:
        for block in self._objects.read(name):
            yield block
            self.progress += len(block)

    def _path(self, link: Link) -> Path:
        return self._directory / f"{link.name}-{link.sha256[:_DIGITS]}"

    def _collect(self, *, fetched: tuple[int, int]) -> None:
        """Remove all but the last ``keep`` fetched versions. Versions newer than the one just fetched count separately.

        Newer versions belong to a worker that is ahead of this one and may be loading them, or to an earlier run in
        this directory. The latter were fetched before any of ours, so they are removed first. The version just fetched
        stays even if the clock was set back since the others came.
        """
        found = {path: version for path in self._directory.iterdir() if (version := _version_of(path)) is not None}
        came = sorted(found, key=lambda path: (found[path] == fetched, path.stat().st_mtime_ns, found[path]))
        newer = [path for path in came if found[path] > fetched]
        older = [path for path in came if found[path] <= fetched]
        for path in newer[: -self._keep] + older[: -self._keep]:
            hidden = path.with_name(f"{_TEMPORARY}old-{path.name}")
            path.rename(hidden)
            shutil.rmtree(hidden)


def _version_of(path: Path) -> tuple[int, int] | None:
    match = re.fullmatch(rf"(\d+)-(\d+)-[0-9a-f]{{{_DIGITS}}}", path.name)
    return None if match is None else (int(match[1]), int(match[2]))
