"""Rewrites files of a run's folder that other processes need, if they are removed or changed while the run is up.

Without bus.json no process finds the run's bus. Without its keys, a worker that starts cannot verify the learner's
messages.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.adapters.registry import BUS_FILE
from asyncrl.bus.adapter import BusServer
from asyncrl.launch.keys import key_files
from asyncrl.launch.keys.signing_keys import KEY_FILES
from asyncrl.os_process import process_space

LOOK_SECONDS = 2.0


class KeptFile(Protocol):
    @property
    def path(self) -> Path: ...

    def stands(self) -> bool:
        """Whether the file is unchanged. Raises OSError if it cannot be checked."""
        ...

    def write(self) -> None:
        """Raises OSError."""
        ...


class AddressFile:
    """Address of the run's bus, readable only by its owner.

    It contains its own inode, which exposes a copied folder whose run is not up.
    """

    def __init__(self, path: Path, *, url: str, token: str) -> None:
        self.path = path
        self._table = {"url": url, "token": token, "pid": os.getpid(), "host": process_space()}

    @classmethod
    def of(cls, directory: Path, server: BusServer) -> AddressFile:
        return cls(directory / BUS_FILE, url=server.url, token=server.token)

    def stands(self) -> bool:
        try:
            with self.path.open("rb") as file:
                return file.read() == self._content(os.fstat(file.fileno()).st_ino)
        except FileNotFoundError:
            return False

    def write(self) -> None:
        self.path.unlink(missing_ok=True)
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self._content(os.fstat(file.fileno()).st_ino))

    def _content(self, inode: int) -> bytes:
        return json.dumps({**self._table, "inode": inode}).encode()


class KeyFile:
    """A key file with its present content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text, self._mode = path.read_text().strip(), path.stat().st_mode & 0o777

    def stands(self) -> bool:
        try:
            return self.path.read_bytes().strip() == self._text.encode()
        except FileNotFoundError:
            return False

    def write(self) -> None:
        key_files.write(self.path, self._text, mode=self._mode)


def forget_workers(directory: Path) -> None:
    """Remove what the workers of an earlier run in this folder kept for their restarts: by it they would take weights
    that they left in a server of their own for those of this run (engines/sglang/stamps.py)."""
    for path in (directory / "logs").glob("*.owner"):
        path.unlink(missing_ok=True)


def of_run(directory: Path, server: BusServer | None) -> list[KeptFile]:
    """Return the files of this run that exist. ``server``: server of the run's own bus"""
    keys = [path for name in KEY_FILES if (path := directory / name).exists()]
    found: list[KeptFile] = [KeyFile(path) for path in keys]
    return found if server is None else [AddressFile.of(directory, server), *found]


async def keep(files: Sequence[KeptFile], *, say: Callable[[str], None]) -> None:
    """Check the files until cancelled. waits for: the clock"""
    problems: dict[Path, str] = {}
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for file in files:
            try:
                if await asyncio.to_thread(file.stands):
                    problems.pop(file.path, None)
                    continue
                await asyncio.to_thread(file.write)
            except OSError as error:
                problem = f"{file.path}: was removed or overwritten, and cannot be written again: {error.strerror}"
                if problems.get(file.path) != problem:
                    say(problem)
                problems[file.path] = problem
            else:
                say(f"{file.path}: was removed or overwritten while the run is up; written again")
