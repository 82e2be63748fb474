"""Weight versions fetched from the object store as model folders, which all workers on a machine share."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from asyncrl.bus.port import ObjectStore
from asyncrl.errors import BusError, ObjectGone, WeightsError
from asyncrl.messages import WeightVersion, replace
from asyncrl.weights.files import add_companions, verified
from asyncrl.weights.objects import delta, versions
from asyncrl.weights.objects.versions import Description, Link

_PART: Final = ".part-"
_TEMPORARY: Final = ".tmp-"
_LOOK_SECONDS: Final = 0.05
_DIGITS: Final = 16


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
                        return verified(replace(weights, uri=str(folder)))
                    shutil.rmtree(folder)
                self._fetch(weights, folder)
                self._collect(fetched=weights.order)
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
        description = versions.from_text(info.metadata.get("description", ""))
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
            verified(replace(weights, uri=str(temporary)))
        except (WeightsError, ObjectGone, FileNotFoundError):  # a delta is gone or wrong, or the base is
            shutil.rmtree(temporary)
            with contextlib.suppress(WeightsError):
                verified(replace(weights, uri=str(self._path(base)), sha256=base.sha256))
                return False
            shutil.rmtree(self._path(base))
            return False
        return True

    def _make_from_full(self, description: Description, weights: WeightVersion, temporary: Path) -> None:
        """Fetch the full version of the chain and apply the deltas after it. Resume an earlier process's download."""
        number = next((number for number, link in enumerate(description.links) if link.full), None)
        if number is None:
            raise WeightsError(f"weights {weights.uri}: stored only as a delta from a version that nobody has")
        base = description.links[number]
        names = [name for name, _ in description.files]
        parts = [self._directory / f"{_PART}{base.name}-{base.sha256[:_DIGITS]}-{name}" for name in names]
        is_resumed = any(part.exists() for part in parts)
        for index, part in enumerate(parts):
            self._download(base.full_name(index), part)
        temporary.mkdir()
        for part, name in zip(parts, names, strict=True):
            part.rename(temporary / name)
        try:
            self._apply(description, description.links[number + 1 :], temporary)
            verified(replace(weights, uri=str(temporary)))
        except WeightsError:
            shutil.rmtree(temporary)
            if not is_resumed:
                raise
            self._make_from_full(description, weights, temporary)  # what the earlier process left was wrong

    def _download(self, name: str, part: Path) -> None:
        """Download the rest of an object into ``part``."""
        with part.open("ab") as stream:
            for block in self._blocks(name, start=stream.tell()):
                stream.write(block)

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

    def _blocks(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        for block in self._objects.read(name, start=start):
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
        found = {path: order for path in self._directory.iterdir() if (order := _order(path)) is not None}
        came = sorted(found, key=lambda path: (found[path] == fetched, path.stat().st_mtime_ns, found[path]))
        newer = [path for path in came if found[path] > fetched]
        older = [path for path in came if found[path] <= fetched]
        for path in newer[: -self._keep] + older[: -self._keep]:
            hidden = path.with_name(f"{_TEMPORARY}old-{path.name}")
            path.rename(hidden)
            shutil.rmtree(hidden)
        for path in self._directory.glob(f"{_PART}*"):
            path.unlink()


def _order(path: Path) -> tuple[int, int] | None:
    match = re.fullmatch(rf"(\d+)-(\d+)-[0-9a-f]{{{_DIGITS}}}", path.name)
    return None if match is None else (int(match[1]), int(match[2]))
