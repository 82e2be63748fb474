"""A real nats-server with the configuration that bin/nats-config writes, and the buses of its roles."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.bus.access import Access
from asyncrl.bus.jetstream import JetStreamBus
from asyncrl.bus.server import find_binary
from tests.conftest import BUS_SIZES

RUNS = ("mine", "other", "whole")


def started(config: Path, ports: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A nats-server and its url."""
    ports.mkdir()
    process = subprocess.Popen(
        [find_binary(), "--config", config, "--ports_file_dir", ports, "--log", ports / "log"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (found := list(ports.glob("*.ports"))) or not found[0].read_text().endswith("}"):
        assert process.poll() is None, (ports / "log").read_text()
        time.sleep(0.01)
    return process, json.loads(found[0].read_text())["nats"][0]


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


class Server:
    """A nats-server on what ``bin/nats-config`` wrote."""

    def __init__(self, directory: Path, *extra: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "asyncrl.bus.nats_config", *RUNS, "--directory", str(directory)]
        made = subprocess.run(
            [*command, "--listen", "127.0.0.1:-1", *extra], capture_output=True, text=True, check=True
        )
        self.said = made.stdout
        self.process, url = started(directory / "nats-server.conf", directory / "ports")
        self.port = urlsplit(url).port

    def access(self, role: str, *, run: str = "mine", **more: str) -> Access:
        return Access(role=role, credentials=f"{self.directory}/{run}/{{role}}", **more)

    def close(self) -> None:
        end(self.process)


@contextlib.asynccontextmanager
async def connected(
    server: Server, role: str, *, run: str = "mine", as_run: str = "", **more: Any
) -> AsyncIterator[Any]:
    """The bus of ``as_run`` (or ``run``) for a role of ``run``."""
    bus = await JetStreamBus.connect(
        f"nats://127.0.0.1:{server.port}",
        run=as_run or run,
        access=server.access(role, run=run, **more),
        storage="file",
        **BUS_SIZES,
    )
    try:
        yield bus
    finally:
        await bus.close()
