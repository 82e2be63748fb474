"""Three nats-servers on loopback, configured by ``bin/nats-config --cluster``; a test may kill any of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server import config as nats_config
from asyncrl.bus.nats_server.server import find_binary
from asyncrl.errors import BusError
from tests.conftest import BUS_SIZES
from tests.harness.ports import free_ports
from tests.harness.roles import access_to

SIZE = 3


class Cluster:
    """``with Cluster(folder, runs=...) as cluster``: servers 0, 1 and 2, named server-1 to server-3."""

    def __init__(self, directory: Path, *, runs: Sequence[str], extra: Sequence[str] = (), first: int = SIZE) -> None:
        """first: number of servers to start at once"""
        self._first = first
        self.directory = directory
        self._runs = runs
        self._extra = extra
        self._scheme = "tls" if "--tls-certificate" in extra else "nats"
        self._ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * SIZE

    def __enter__(self) -> Cluster:
        ports = free_ports(2 * SIZE)
        self._ports = ports[:SIZE]
        nodes = [f"127.0.0.1:{ports[i]}:{ports[SIZE + i]}" for i in range(SIZE)]
        directory = str(self.directory)
        nats_config.main([*self._runs, "--directory", directory, *self._extra, "--cluster", *nodes])
        for index in range(self._first):
            self.start(index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for index in range(SIZE):
            self.kill(index)

    @property
    def url(self) -> str:
        return ",".join(self.urls)

    @property
    def urls(self) -> list[str]:
        return [f"{self._scheme}://127.0.0.1:{port}" for port in self._ports]

    def credentials(self, run: str) -> str:
        return f"{self.directory}/{run}/{{role}}"

    def start(self, index: int) -> None:
        config = self.directory / nats_config.server_name(index) / nats_config.CONFIG_FILE
        self._processes[index] = subprocess.Popen(
            [find_binary(), "--config", config, "--log", config.parent / "log"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        process, self._processes[index] = self._processes[index], None
        if process is not None:
            os.kill(process.pid, number)
            process.wait()

    def signal(self, index: int, number: signal.Signals) -> None:
        process = self._processes[index]
        assert process is not None
        process.send_signal(number)

    @contextlib.asynccontextmanager
    async def bus(
        self,
        run: str,
        *,
        role: str = "learner",
        at: int | None = None,
        replicas: int = SIZE,
        tls_ca: str = "",
        **sizes: Any,
    ) -> AsyncIterator[JetStreamBus]:
        """``at``: index of the only server that the bus knows."""
        bus = await JetStreamBus.connect(
            self.url if at is None else self.urls[at],
            run=run,
            access=access_to(self.directory / run, role, tls_ca=tls_ca),
            storage="file",
            replicas=replicas,
            **(BUS_SIZES | {"connect_seconds": 30.0} | sizes),
        )
        try:
            yield bus
        finally:
            await bus.close()

    async def until_whole(self, bus: JetStreamBus) -> None:
        """Wait until each stream of the run has a leader, and all of its replicas are up and current."""
        while not all([await self._is_whole(bus, stream) for stream in sorted(bus._streams.known)]):
            await asyncio.sleep(0.1)

    async def _is_whole(self, bus: JetStreamBus, stream: str) -> bool:
        cluster = (await info(bus, stream))["cluster"]
        copies = cluster.get("replicas") or ()
        return (
            bool(cluster.get("leader"))
            and len(copies) == SIZE - 1
            and all(copy["current"] and not copy.get("offline") for copy in copies)
        )


async def info(bus: JetStreamBus, stream: str) -> dict[str, Any]:
    try:
        return await bus._connection.api(f"STREAM.INFO.{stream}")
    except BusError:
        return {"cluster": {}}


async def leader(bus: JetStreamBus, stream: str) -> int:
    """Return the index of the server that leads a stream."""
    while not (name := (await info(bus, stream))["cluster"].get("leader", "")):
        await asyncio.sleep(0.1)
    return int(name.rpartition("-")[2]) - 1


def server_of(bus: JetStreamBus) -> int:
    """Return the index of the server that a bus is connected to."""
    return int(bus._connection._client._server_info["server_name"].rpartition("-")[2]) - 1
