"""Faults of a part, a process, its disk or its connection, which last while a context is open."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

FILLER: Final = "filler"


@contextlib.contextmanager
def hanging(folder: Path, name: str) -> Iterator[None]:
    """The part of this name hangs."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP on entry, SIGCONT on exit."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """No file of this process may grow."""
    with _limited(pid, resource.RLIMIT_FSIZE, 0):
        yield


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """This process can open no more descriptors."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in itertools.count() if number not in taken)
    with _limited(pid, resource.RLIMIT_NOFILE, lowest_free):
        yield


@contextlib.contextmanager
def no_memory(pid: int) -> Iterator[None]:
    """This process gets no more address space."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    with _limited(pid, resource.RLIMIT_AS, pages * resource.getpagesize()):
        yield


@contextlib.contextmanager
def _limited(pid: int, what: int, limit: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # the fault may have killed it
            resource.prlimit(pid, what, before)


@contextlib.contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A file system of that size. Raises OSError where mounting is not permitted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        raise OSError(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    with (disk / FILLER).open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


@contextlib.contextmanager
def kept_full(disk: Path) -> Iterator[None]:
    """Keep the disk full, even if files are removed from it."""
    is_over = threading.Event()

    def keep() -> None:
        while not is_over.wait(0.05):
            fill(disk)

    fill(disk)
    filling = threading.Thread(target=keep, name="filling", daemon=True)
    filling.start()
    try:
        yield
    finally:
        is_over.set()
        filling.join()
        (disk / FILLER).unlink()


class Proxy:
    """A proxy to a server that can fall silent without closing connections, as a half-open connection does."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listening.getsockname()[1]}"
        self.is_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(self._server)
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        while not self.is_silent:
            for ready in select.select([client, server], [], [], 0.1)[0]:
                data = ready.recv(2**16)
                if not data:
                    client.close()
                    server.close()
                    return
                if not self.is_silent:
                    (server if ready is client else client).sendall(data)
        time.sleep(3600)
