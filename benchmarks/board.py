"""Measure the cost of `asyncrl board` for a large fleet: its CPU and memory, and the bytes per second to a browser.

    python -m benchmarks.board                                  1,000 workers, two minutes
    python -m benchmarks.board --workers 100 --seconds 60 --json FILE

Real: nats-server with its store on disk, the board in its own process, and a client that reads its stream. Simulated:
the workers. One process sends their heartbeats, each worker every 2 s. At each heartbeat a fifth of the workers changes
its activity and a tenth has a newer version, and there is a step every 2 s. A fleet with long answers changes far less.

stream     bytes per second of server-sent events
page       bytes of the lanes that a browser loads first, plain and compressed
cpu        share of one core
memory     memory of the board's process, at each fifth of the time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.messages import Heartbeat, StepMetrics, Wait
from asyncrl.messages.topics import ACTORS, METRICS
from benchmarks.fleet_probe import cpu_seconds, rss_bytes

RUN = "board"
BEAT_SECONDS = 2.0
SIZES: dict[str, Any] = {"max_prompts": 8, "max_log_bytes": 2**22, "ack_seconds": 30.0}
WAITS = (
    (),
    (Wait(what="prompts", on="prompt-source", seconds=1.0),),
    (Wait(what="its engine to load weights of version 7", on="load", seconds=0.2),),
)


class Fleet:
    """Workers that send heartbeats, and a learner with one step per heartbeat."""

    def __init__(self, bus: JetStreamBus, *, workers: int) -> None:
        self._bus = bus
        self._random = random.Random(0)
        self._doing = [0] * workers
        self._versions = [0] * workers
        self._beat = 0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            self._beat += 1
            for number in range(len(self._doing)):
                await self._bus.put(ACTORS, self._heartbeat(number), key=f"w{number}", is_sure=False)
            numbers = {"reward/mean": self._random.random(), "weights/version": float(self._beat)}
            numbers |= {f"metric/{number}": self._random.random() for number in range(80)}
            await self._bus.put(METRICS, StepMetrics(step=self._beat, numbers=numbers, staleness=(3, 2, 1)))
            await asyncio.sleep(max(0.0, BEAT_SECONDS - (time.monotonic() - began)))

    def _heartbeat(self, number: int) -> Heartbeat:
        if self._random.random() < 0.2:
            self._doing[number] = self._random.randrange(len(WAITS))
        if self._random.random() < 0.1:
            self._versions[number] = self._beat
        return Heartbeat(
            actor=f"w{number}",
            role="rollout-worker",
            beat=self._beat,
            policy_version=self._versions[number],
            waits=WAITS[self._doing[number]],
            numbers={"rollout/running": 0.0 if self._doing[number] == 1 else 32.0, "rollout/tokens_per_second": 900.0},
            life=f"life-{number}",
            host=f"node-{number // 8}",
            pid=number,
        )


async def measured(*, workers: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-board-") as folder, EmbeddedServer(Path(folder)) as server:
        bus = await JetStreamBus.connect(server.url, run=RUN, token=server.token, storage="file", **SIZES)
        fleet = asyncio.create_task(Fleet(bus, workers=workers).run())
        command = [
            "-m",
            "asyncrl",
            "board",
            "--port",
            "0",
            "--set",
            f"bus.url={server.url}",
            "--set",
            f"run.name={RUN}",
        ]
        environment = os.environ | {"ASYNCRL_BUS_TOKEN": server.token}
        board = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert board.stdout is not None
        try:
            url = (await board.stdout.readline()).decode().split()[2]
            return {"workers": workers, "seconds": seconds} | await _watched(url, board.pid, seconds=seconds)
        finally:
            board.terminate()
            await board.wait()
            fleet.cancel()
            await asyncio.gather(fleet, return_exceptions=True)
            await bus.close()


async def _watched(url: str, pid: int, *, seconds: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        async with session.get(f"{url}api/stream") as stream:
            await stream.content.readuntil(b'"kind":"lanes"')
            began, cpu, received, memory = time.monotonic(), cpu_seconds(pid), 0, list[int]()
            while (passed := time.monotonic() - began) < seconds:
                received += len(await stream.content.readany())
                if passed > (len(memory) + 1) * seconds / 5:
                    memory.append(rss_bytes(pid))
            used = cpu_seconds(pid) - cpu
            memory.append(rss_bytes(pid))
        lanes = {}
        for name, headers in (("page_bytes", {"Accept-Encoding": "identity"}), ("page_bytes_compressed", {})):
            async with session.get(f"{url}api/runs/0/lanes", headers=headers) as answer:
                lanes[name] = len(await answer.read())
    return {
        "stream_bytes_per_second": received / passed,
        "cpu_share": used / passed,
        "memory_bytes": memory,
        "memory_bytes_behind_page": rss_bytes(pid),
        **lanes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1000])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path, help="append a line for each fleet to this file")
    options = parser.parse_args()
    for workers in options.workers:
        row = asyncio.run(measured(workers=workers, seconds=options.seconds))
        print(
            f"{workers:5d} workers: stream {row['stream_bytes_per_second'] / 1e3:.1f} kB/s, "
            f"page {row['page_bytes'] / 1e3:.0f} kB ({row['page_bytes_compressed'] / 1e3:.0f} compressed), "
            f"cpu {row['cpu_share']:.0%} of a core, "
            f"memory {', '.join(f'{one / 2**20:.0f}' for one in row['memory_bytes'])} MiB, "
            f"behind the page {row['memory_bytes_behind_page'] / 2**20:.0f}"
        )
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
