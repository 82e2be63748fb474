"""Weight versions fetched from the object store as model folders, which all workers on a machine share."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
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
from asyncrl.tensors import safetensors_file, weight_files
from asyncrl.tensors.weight_files import WEIGHTS_FILE
from asyncrl.weights.files import add_companions, verified
from asyncrl.weights.objects import chain, delta
from asyncrl.weights.objects.chain import Link, Route

_PART: Final = ".part-"
_WORK: Final = ".part-work"
_TEMPORARY: Final = ".tmp-"
_LOOK_SECONDS: Final = 0.05
_DIGITS: Final = 16
_SMALL_BYTES: Final = 2**20
_SIDE_BY_SIDE: Final = 8


class FetchedVersions:
    """Folders DIRECTORY/INCARNATION-POLICY_VERSION-SHA256. Any number of processes of one machine may share them."""

    def __init__(self, directory: Path, *, keep: int, model_path: Path, objects: ObjectStore) -> None:
        """``keep``: versions to keep. ``model_path``: folder whose config and tokenizer are added to every version."""
        self._directory = directory.absolute()
        self._keep = max(keep, 2)
        self._model_path = model_path
        self._objects = objects
        self._progress = 0
        self._parts: dict[int, FetchedVersions] = {}

    @property
    def progress(self) -> int:
        return self._progress + sum(part.progress for part in tuple(self._parts.values()))

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
                    self._progress += 1  # if the other process hangs, that process must be reported as stuck
                    time.sleep(_LOOK_SECONDS)
            yield

    def _fetch(self, weights: WeightVersion, folder: Path) -> None:
        for path in self._directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)
        info = self._objects.info(weights.uri)
        if info is None:
            raise WeightsError(f"weights {weights.uri}: not found; removed for newer versions")
        if chain.part_of(weights.uri) is None:
            self._fetch_parts(weights, folder, [str(uri) for uri in json.loads(info.metadata["parts"])])
            return
        links = chain.from_text(info.metadata.get("chain", ""))
        if not links or links[-1].sha256 != weights.sha256:
            raise WeightsError(
                f"weights {weights.uri}: sha256 {weights.sha256[:12]}... was announced, but others are stored there"
            )
        lost: set[str] = set()
        problem = "no route from an available version"
        while (route := chain.route(links, at_hand=self._at_hand(links), lost=lost)) is not None:
            try:
                file = self._take(route)
            except _Lost as error:
                lost |= error.objects
                problem = str(error)
            else:
                self._show(file, folder)
                return
        raise WeightsError(f"weights {weights.uri}: cannot be fetched: {problem}")

    def _fetch_parts(self, weights: WeightVersion, folder: Path, uris: Sequence[str]) -> None:
        """Fetch each part like a whole version, and link its file into the folder under the part's name."""
        index = b"".join(self._counted(weights.uri))
        if (found := hashlib.sha256(index).hexdigest()) != weights.sha256:
            raise WeightsError(
                f"weights {weights.uri}: sha256 is {found[:12]}..., but {weights.sha256[:12]}... was announced"
            )
        files = weight_files.read_index(index)
        for number in range(1, len(files) + 1):
            if number not in self._parts:
                self._parts[number] = FetchedVersions(
                    self._directory / f"part-{number}",
                    keep=self._keep,
                    model_path=self._model_path,
                    objects=self._objects,
                )
        temporary = self._directory / f"{_TEMPORARY}{folder.name}"
        temporary.mkdir()

        def fetch(number: int) -> None:
            file, uri = files[number - 1], uris[number - 1]
            part = replace(weights, uri=uri, sha256=file.sha256, num_bytes=file.num_bytes)
            (temporary / file.file).hardlink_to(self._parts[number].folder(part) / WEIGHTS_FILE)

        with concurrent.futures.ThreadPoolExecutor(_SIDE_BY_SIDE, "part") as readers:
            list(readers.map(fetch, range(1, len(files) + 1)))
        (temporary / weight_files.INDEX_FILE).write_bytes(index)
        add_companions(temporary, self._model_path)
        temporary.rename(folder)

    def _at_hand(self, links: chain.Chain) -> set[Link]:
        """Return the links whose weights are on this machine. They are not verified yet."""
        files = {link: self._kept(link) / WEIGHTS_FILE for link in links}
        return {link for link, file in files.items() if file.exists() and file.stat().st_size}

    def _kept(self, link: Link) -> Path:
        return self._directory / f"{link.name}-{link.sha256[:_DIGITS]}"

    # -- one way ------------------------------------------------------------------------------------------------------

    def _take(self, route: Route) -> Path:
        """Follow a route. Return a verified file with its weights. Raises _Lost if an object is missing or wrong."""
        base = self._kept(route.base) / WEIGHTS_FILE if route.is_at_hand else self._take_whole(route.base)
        if not route.links:
            return base
        file = self._directory / _WORK
        if route.is_at_hand:
            shutil.copyfile(base, file)
        else:
            base.rename(file)
        try:
            self._apply(route.links, file)
            if safetensors_file.sha256(file) != route.links[-1].sha256:
                raise WeightsError("the result differs from the published weights")
        except WeightsError as error:
            if route.is_at_hand and safetensors_file.sha256(base) != route.base.sha256:
                shutil.rmtree(base.parent)  # the base is wrong; the deltas may be right
                raise _Lost(set(), f"{base}: has changed since it was fetched") from error
            deltas = {link.delta_name for link in route.links}
            raise _Lost(deltas, f"{', '.join(sorted(deltas))}: {error}") from error
        return file

    def _apply(self, links: chain.Chain, file: Path) -> None:
        """Apply deltas in order. Small ones are fetched concurrently, as each costs a round trip over a long link."""
        with concurrent.futures.ThreadPoolExecutor(_SIDE_BY_SIDE, "delta") as readers:
            small = [link for link in links if link.delta <= _SMALL_BYTES]
            read = {link: readers.submit(list, self._counted(link.delta_name)) for link in small}
            for link in links:
                try:
                    blocks = read[link].result() if link in read else self._counted(link.delta_name)
                    delta.apply(np.memmap(file, mode="r+"), iter(blocks))
                except ObjectGone as error:
                    raise _Lost({link.delta_name}, str(error)) from error

    def _take_whole(self, link: Link) -> Path:
        """Fetch a full version. Resumes the partial download of an earlier process."""
        part = self._directory / f"{_PART}{link.name}-{link.sha256[:_DIGITS]}"
        is_resumed = part.exists()
        try:
            found = self._download(link, part)
            if found != link.sha256 and is_resumed:
                part.unlink()
                found = self._download(link, part)
        except ObjectGone as error:
            raise _Lost({link.full_name}, str(error)) from error
        if found != link.sha256:
            part.unlink()
            raise _Lost(
                {link.full_name},
                f"{link.full_name}: sha256 is {found[:12]}..., but {link.sha256[:12]}... was published",
            )
        return part

    def _download(self, link: Link, part: Path) -> str:
        """Download the rest of ``part``. Return the file's SHA-256."""
        digest = hashlib.sha256()
        with part.open("a+b") as stream:
            stream.seek(0)
            while block := stream.read(2**20):
                digest.update(block)
            for block in self._counted(link.full_name, start=stream.tell()):
                stream.write(block)
                digest.update(block)
        return digest.hexdigest()

    def _counted(self, name: str, *, start: int = 0) -> Iterator[bytes]:
        for block in self._objects.read(name, start=start):
            yield block
            self._progress += len(block)

    def _show(self, file: Path, folder: Path) -> None:
        """Move a complete model folder into place with one rename."""
        temporary = self._directory / f"{_TEMPORARY}{folder.name}"
        temporary.mkdir()
        add_companions(temporary, self._model_path)
        file.rename(temporary / WEIGHTS_FILE)
        temporary.rename(folder)

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


class _Lost(Exception):
    """Objects that are missing or corrupt."""

    def __init__(self, objects: set[str], problem: str) -> None:
        super().__init__(problem)
        self.objects = objects


def _order(path: Path) -> tuple[int, int] | None:
    match = re.fullmatch(rf"(\d+)-(\d+)-[0-9a-f]{{{_DIGITS}}}", path.name)
    return None if match is None else (int(match[1]), int(match[2]))
