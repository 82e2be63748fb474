"""A real nats-server with a configuration written by bin/nats-config, and the buses of its roles."""

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

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.nats_server.server import find_binary
from asyncrl.messages.topics import NAMED_ROLES
from tests.conftest import BUS_SIZES

RUNS = ("mine", "other", "whole")


def started(config: Path, ports: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a nats-server. Return it and its url."""
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


def access_to(folder: Path, role: str, *, worker: str = "w0", **more: str) -> Credentials:
    """The credentials of a role, or of a worker or server, in the folder of a run that ``bin/nats-config`` wrote."""
    name = worker if role in NAMED_ROLES else ""
    return Credentials(role=role, worker=name, credentials=f"{folder}/{{role}}", **more)


class Server:
    """A nats-server with the configuration of ``bin/nats-config``."""

    def __init__(self, directory: Path, *extra: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "asyncrl.bus.nats_server.config", *RUNS, "--directory", str(directory)]
        listen = ["--listen", "127.0.0.1:-1", "--servers", "w0"]
        self.said = subprocess.run([*command, *listen, *extra], capture_output=True, text=True, check=True).stdout
        self.process, url = started(directory / "nats-server.conf", directory / "ports")
        self.port = urlsplit(url).port or 0

    def access(self, role: str, *, run: str = "mine", worker: str = "w0", **more: str) -> Credentials:
        return access_to(self.directory / run, role, worker=worker, **more)

    def close(self) -> None:
        end(self.process)


@contextlib.asynccontextmanager
async def connected(
    server: Server,
    role: str,
    *,
    run: str = "mine",
    as_run: str = "",
    connect_seconds: float = 10.0,
    max_log_bytes: int = BUS_SIZES["max_log_bytes"],
    **more: Any,
) -> AsyncIterator[Any]:
    """The bus of ``as_run`` (or ``run``) for a role of ``run``."""
    bus = await JetStreamBus.connect(
        f"nats://127.0.0.1:{server.port}",
        run=as_run or run,
        access=server.access(role, run=run, **more),
        storage="file",
        connect_seconds=connect_seconds,
        **(BUS_SIZES | {"max_log_bytes": max_log_bytes}),
    )
    try:
        yield bus
    finally:
        await bus.close()
