"""Writes the small files of keys/ in a run's folder, and counts the lives of processes that sign."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Final

_LIFE_DIGITS: Final = 18

log = logging.getLogger("asyncrl.keys")


def next_life(folder: Path) -> int:
    """Return a number higher than all before, even if the clock went back."""
    path, life = folder / "life", now()
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read(_LIFE_DIGITS + 1).strip()
            life = max(int(text) + 1 if text.isdecimal() and len(text) <= _LIFE_DIGITS else 0, life)
            file.seek(0)
            file.write(str(life))  # overwrites the old number, which works on a full disk too
            file.truncate()
    except OSError as error:
        log.warning("%s: cannot be written: %s; the clock is used instead", path, error.strerror)
    return life


def now() -> int:
    """Return the life of a process whose key is as new as the process."""
    return time.time_ns() // 1000


def write(path: Path, text: str, *, mode: int) -> None:
    """Write a file completely or not at all; it is on disk on return. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
