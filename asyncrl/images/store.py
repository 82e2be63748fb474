"""Images by the digest of their file: in memory, in the run's folder, and on the bus's object store.

    learner   keeps each image of the data in RUN/images/DIGEST, and puts it once on the bus while prompts show it
    worker    reads it from the bus when a prompt shows it, and keeps the last ones in memory
    agents    a worker sends what an environment showed with the group that it made (TrajectoryGroup.image_files)

Everything is addressed by its SHA-256 and compared with it, so it does not matter who wrote it.

Tests: tests/unit/images/test_store.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.bus.port import ObjectStore
from asyncrl.errors import ImageError, ObjectGone
from asyncrl.messages.images import ImageRef

PREFIX: Final = "image-"
"""Begins the names of images on the bus's object store. Weights have others."""
FOLDER: Final = "images"
"""Folder of a run's images, in its folder."""
CACHE_BYTES: Final = 256 * 2**20


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of an image's file, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """An image of a prompt as an engine gets it.  ref: where the prompt shows it;  data: the image's file"""

    ref: ImageRef
    data: bytes


def share_images(run_directory: Path, branch: Path) -> None:
    """Give the folder of a run's branch the run's images: links, or copies on another file system."""
    for file in (run_directory / FOLDER).glob("[!.]*"):
        target = branch / FOLDER / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            try:
                os.link(file, target)
            except OSError:
                hidden = target.with_name(f".{file.name}")
                shutil.copy2(file, hidden)
                hidden.replace(target)  # a killed command leaves no half of an image


class ImageStore:
    """Blocking, thread-safe.

    objects      object store of the run's bus; None: nobody else needs the images
    folder       folder that keeps them; None: in memory alone
    cache_bytes  most bytes of files in memory
    """

    def __init__(
        self, *, objects: ObjectStore | None = None, folder: Path | None = None, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._objects, self._folder, self._most = objects, folder, cache_bytes
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._on_bus: set[str] | None = None  # what is there is asked before the first is put
        self._publishing = threading.Lock()
        self._kept: set[str] = set()
        self._lock = threading.Lock()

    def add(self, data: bytes) -> str:
        """Keep an image's file, and return its digest."""
        digest = digest_of(data)
        self._remember(digest, data)
        if self._folder is not None and not (path := self._folder / digest).exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            hidden = path.with_name(f".{digest}.{os.getpid()}.{threading.get_ident()}")
            hidden.write_bytes(data)
            hidden.replace(path)
        return digest

    def get(self, digest: str) -> bytes:
        """Return an image's file. Raises ImageError if it is nowhere or damaged, and BusError."""
        with self._lock:
            if (known := self._cache.get(digest)) is not None:
                self._cache.move_to_end(digest)
                return known
        data = self._read(digest)
        if digest_of(data) != digest:
            raise ImageError(f"image {digest[:12]} is damaged: its file has another SHA-256")
        self._remember(digest, data)
        return data

    def files(self, images: Sequence[ImageRef]) -> tuple[ImageFile, ...]:
        """Return the images of a prompt with their files. Raises as ``get`` does."""
        return tuple(ImageFile(ref=one, data=self.get(one.digest)) for one in images)

    def publish(self, digests: Iterable[str], *, is_kept: bool = False) -> None:
        """Put images on the bus that are not there.  is_kept: until the end of the run. Raises ImageError, BusError."""
        assert self._objects is not None
        with self._publishing:
            for digest in digests:
                if is_kept:
                    self._kept.add(digest)
                if digest not in self._published():
                    self._objects.put(PREFIX + digest, [self.get(digest)], metadata={})
                    self._published().add(digest)

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove all other images from the bus, also those of an earlier learner. Raises BusError."""
        assert self._objects is not None
        with self._publishing:
            for digest in self._published() - {*digests} - self._kept:
                self._objects.remove(PREFIX + digest)
                self._published().discard(digest)

    def _published(self) -> set[str]:
        """The images on the bus."""
        assert self._objects is not None
        if self._on_bus is None:
            names = self._objects.names()
            self._on_bus = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
        return self._on_bus

    def _read(self, digest: str) -> bytes:
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):
                return (self._folder / digest).read_bytes()
        if self._objects is not None:
            with contextlib.suppress(ObjectGone):
                return b"".join(self._objects.read(PREFIX + digest))
        looked = [str(self._folder)] if self._folder is not None else []
        looked += ["the run's bus"] if self._objects is not None else []
        mend = "; put the files of that folder back, they have the names of their SHA-256" if self._folder else ""
        raise ImageError(f"image {digest[:12]} is nowhere: not in {', and not on '.join(looked)}{mend}")

    def _remember(self, digest: str, data: bytes) -> None:
        with self._lock:
            if digest in self._cache:
                return
            self._cache[digest] = data
            self._num_bytes += len(data)
            while self._num_bytes > self._most and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._num_bytes -= len(oldest)
