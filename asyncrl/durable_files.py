"""Files that a crash leaves as they were or as they were to be, whole."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file completely or not at all, and its folder if there is none. Raises OSError.

    mode: of a new file, before the process's umask
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a hard link to a file that never changes, or a copy on another file system. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sync(*paths: Path) -> None:
    """Sync files, and the entries of folders, to disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
