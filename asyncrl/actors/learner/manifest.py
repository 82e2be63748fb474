"""Size and SHA-256 of every file of a folder, written last, so that later damage is found before the files are used.

manifest.json
{"files": {"learner.json": {"bytes": 812, "sha256": "9f0c..."}, "backend/state.safetensors": ...}}
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from asyncrl.durable_files import write_whole

FILE: Final = "manifest.json"

_SIDE_BY_SIDE: Final = 8
"""Files hashed concurrently. Hashing releases the interpreter lock."""
UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError)
"""Errors from reading damaged JSON. The last two come from deep nesting and from numbers like 1e999."""
_GONE: Final = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""The file is missing, or its damaged name cannot be a file name. Any other errno concerns the disk, the network or the
reader, and may pass."""


def write(folder: Path, *, hashed: Mapping[Path, str] | None = None) -> None:
    """Write the manifest of all files in ``folder``. ``hashed``: SHA-256 of files for which it is already
    known."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    known = dict(hashed or {})
    others = [path for path in paths if path not in known]
    known |= zip(others, _hash_all(others), strict=True)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": known[path]} for path in paths
    }
    write_whole(folder / FILE, json.dumps({"files": files}, indent=1))


def find_damage(folder: Path, *, only: str = "") -> str:
    """Describe what is wrong with the files of ``folder``; empty if nothing is. ``only``: hash only this file, and
    check the sizes of the others.

    Files that are not in the manifest are ignored.
    """
    try:
        files = _read(folder)
        wanted = {only: files[only]} if only else files
        for name, file in files.items():  # check sizes before hashing
            if (size := (folder / name).stat().st_size) != file["bytes"]:
                return f"{name} has {size:,} bytes, {file['bytes']:,} were written"
        found = _hash_all([folder / name for name in wanted])
        for (name, file), sha256 in zip(wanted.items(), found, strict=True):
            if sha256 != file["sha256"]:
                return f"{name} is not as it was written: its sha256 differs"
    except OSError as error:
        if not is_damage(error):
            raise
        name = os.path.relpath(error.filename, folder) if error.filename else "a file"
        return f"{name} cannot be read: {error.strerror}"
    except UNREADABLE as error:
        return f"{FILE} cannot be read: {type(error).__name__} {error}"
    return ""


def is_damage(error: OSError) -> bool:
    """Whether a file that could not be read is gone or replaced, rather than temporarily out of reach."""
    return error.errno in _GONE


def _read(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / FILE).read_text())
    files: dict[str, Any] = table["files"]
    if not files:
        raise ValueError("no files")
    for file in files.values():
        int(file["bytes"]), str(file["sha256"])
    return files


def _hash_all(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1), "sha256") as threads:
        return list(threads.map(_hash_one, paths))


def _hash_one(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
