"""Measure the throughput of the bus for trajectory groups, and the latency of a group.

    python -m benchmarks.bus [--quick] [--json FILE] [--groups 64] [--step-seconds 30] [--sync-seconds 1]

A real nats-server runs on loopback. Publishers share one process, each with its own connection. The reader is another
process that decodes every group, as the learner does.

peak    every publisher publishes as fast as the server acknowledges. MB/s from the first publish to the last record
        read; the latency is then mostly queueing time, because the reader is behind.
half    the same at half of the peak's rate, open loop: groups are due at fixed times, and the latency counts from the
        due time, so that a stall is charged to everything it delays.
latency from the call of publish to the decoded record in the reader.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvloop

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer, find_binary
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import TRAJECTORIES

SIZES = {"1 kB": 1_000, "64 kB": 64_000, "300 kB": 300_000, "1 MB": 1_000_000, "4 MB": 4_000_000}
BYTES_PER_TOKEN = 9
GROUP_SIZE = 8
END = "end"
GOAL_MILLISECONDS = 20.0
LOG_BYTES = 2 * 2**30

Storage = Literal["file", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The reader's measurements of one load."""

    groups: int
    megabytes_per_second: float
    groups_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    max_milliseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One batch of 300 kB groups on an idle bus, one publisher and one reader.

    publish_seconds  a worker's time in publish(), all groups in sequence
    read_seconds     the learner's time to take and decode them from a log that holds them all
    share            (publish_seconds + read_seconds) / step_seconds, as if nothing overlapped
    publish_cpu_milliseconds, read_cpu_milliseconds  the client's CPU time per group: encoding and sockets; and
                     reading, checking and decoding. The least of all repeats, because other load only adds to it
    """

    groups: int
    step_seconds: float
    publish_seconds: float
    read_seconds: float
    share: float
    publish_cpu_milliseconds: float
    read_cpu_milliseconds: float


# -- messages ----------------------------------------------------------------------------------------------------------


def make_group(num_bytes: int) -> TrajectoryGroup:
    """Return a group whose message has about ``num_bytes``: GROUP_SIZE trajectories, or as many as fit."""
    generator = np.random.default_rng(0)
    count = max(1, min(GROUP_SIZE, num_bytes // 400))

    def made(length: int) -> TrajectoryGroup:
        trajectories = tuple(
            Trajectory(
                tokens=generator.integers(0, 150_000, length, dtype=np.int32),
                response_mask=np.ones(length, np.bool_),
                behavior_logprobs=-generator.random(length, dtype=np.float32),
                version_spans=(VersionSpan(start=0, incarnation=0, policy_version=3),),
                reward=1.0,
            )
            for _ in range(count)
        )
        return TrajectoryGroup(
            group_id=0, prompt_tokens=np.array([1, 2, 3], np.int32), trajectories=trajectories, worker="w"
        )

    overhead = len(encode(made(1))) - count * BYTES_PER_TOKEN
    return made(max(1, (num_bytes - overhead) // (count * BYTES_PER_TOKEN)))


def stamped(group: TrajectoryGroup, number: int, at: float) -> TrajectoryGroup:
    """Return the group with a time stamp in ``seconds``, from the clock that all processes of a machine share."""
    return TrajectoryGroup(
        group_id=number, prompt_tokens=group.prompt_tokens, trajectories=group.trajectories, worker="w", seconds=at
    )


# -- the reader's process ----------------------------------------------------------------------------------------------


def read_in_its_own_process(pipe: Connection) -> None:
    while (order := pipe.recv()) is not None:
        uvloop.run(read_one_load(pipe, **order))


async def read_one_load(pipe: Connection, *, address: dict[str, Any], after: int) -> None:
    bus = await open_bus(**address)
    latencies: list[float] = []
    num_bytes = 0
    first = last = 0.0
    async with bus.read(TRAJECTORIES, after=after) as records:
        pipe.send("ready")
        async for record in records:
            assert record.message is not None, record.problem
            now = time.monotonic()
            if record.message.error == END:
                break
            first, last = first or record.message.seconds, now
            latencies.append(now - record.message.seconds)
            num_bytes += record.num_bytes
    await bus.close()
    pipe.send((latencies, num_bytes, last - first))


async def open_bus(*, url: str, token: str, run: str, storage: Storage) -> JetStreamBus:
    return await JetStreamBus.connect(
        url,
        run=run,
        token=token,
        max_prompts=64,
        max_log_bytes=LOG_BYTES,
        ack_seconds=60.0,
        storage=storage,
    )


# -- the publishers' process -------------------------------------------------------------------------------------------


async def publish_at_peak(
    buses: list[JetStreamBus], group: TrajectoryGroup, *, seconds: float, numbers: Iterator[int]
) -> None:
    """Publish with every publisher as fast as its acknowledgements come."""
    end = time.monotonic() + seconds

    async def publisher(bus: JetStreamBus) -> None:
        while (now := time.monotonic()) < end:
            number = next(numbers)
            await bus.publish(TRAJECTORIES, stamped(group, number, now), key=str(number))

    async with asyncio.TaskGroup() as tasks:
        for bus in buses:
            tasks.create_task(publisher(bus))


async def publish_at_rate(
    buses: list[JetStreamBus], group: TrajectoryGroup, *, seconds: float, numbers: Iterator[int], rate: float
) -> None:
    """Publish groups at fixed times. The next free publisher takes each group."""
    start = time.monotonic() + 0.05
    slots = iter(range(max(20, int(rate * seconds))))

    async def publisher(bus: JetStreamBus) -> None:
        for slot in slots:
            due = start + slot / rate
            await asyncio.sleep(due - time.monotonic())
            number = next(numbers)
            await bus.publish(TRAJECTORIES, stamped(group, number, due), key=str(number))

    async with asyncio.TaskGroup() as tasks:
        for bus in buses:
            tasks.create_task(publisher(bus))


async def measure(
    buses: list[JetStreamBus],
    pipe: Connection,
    group: TrajectoryGroup,
    *,
    address: dict[str, Any],
    seconds: float,
    numbers: Iterator[int],
    rate: float = 0.0,
) -> Load:
    """Run one load and return the reader's measurements. A rate of 0 is the peak."""
    loop = asyncio.get_running_loop()
    pipe.send({"address": address, "after": await buses[0].last_sequence(TRAJECTORIES)})
    await loop.run_in_executor(None, pipe.recv)
    if rate:
        await publish_at_rate(buses, group, seconds=seconds, numbers=numbers, rate=rate)
    else:
        await publish_at_peak(buses, group, seconds=seconds, numbers=numbers)
    end = TrajectoryGroup(group_id=0, prompt_tokens=group.prompt_tokens, trajectories=(), error=END)
    await buses[0].publish(TRAJECTORIES, end, key=f"{END}-{next(numbers)}")
    latencies, num_bytes, took = await loop.run_in_executor(None, pipe.recv)
    await buses[0].trim(TRAJECTORIES, through=await buses[0].last_sequence(TRAJECTORIES))
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    return Load(
        groups=len(latencies),
        megabytes_per_second=round(num_bytes / took / 1e6, 1),
        groups_per_second=round(len(latencies) / took, 1),
        p50_milliseconds=round(float(p50), 2),
        p99_milliseconds=round(float(p99), 2),
        max_milliseconds=round(max(latencies) * 1e3, 2),
    )


async def measure_row(
    server: EmbeddedServer,
    pipe: Connection,
    *,
    storage: Storage,
    num_bytes: int,
    publishers: int,
    seconds: float,
    numbers: Iterator[int],
) -> dict[str, Any]:
    address: dict[str, Any] = {"url": server.url, "token": server.token, "run": f"bench-{storage}", "storage": storage}
    group = make_group(num_bytes)
    async with contextlib.AsyncExitStack() as stack:
        buses = [await open_bus(**address) for _ in range(publishers)]
        for bus in buses:
            stack.push_async_callback(bus.close)
        peak = await measure(buses, pipe, group, address=address, seconds=seconds, numbers=numbers)
        half = await measure(
            buses, pipe, group, address=address, seconds=seconds, numbers=numbers, rate=peak.groups_per_second / 2
        )
    return {
        "storage": storage,
        "message_bytes": len(encode(group)),
        "publishers": publishers,
        "peak": asdict(peak),
        "half": asdict(half),
    }


async def measure_share(server: EmbeddedServer, *, groups: int, step_seconds: float, repeats: int) -> Share:
    address: dict[str, Any] = {"url": server.url, "token": server.token, "run": "bench-file", "storage": "file"}
    bus, group = await open_bus(**address), make_group(SIZES["300 kB"])
    publish_seconds, read_seconds, publish_cpu, read_cpu = [], [], [], []
    for repeat in range(repeats):
        after = await bus.last_sequence(TRAJECTORIES)
        started, cpu = time.perf_counter(), time.process_time()
        for number in range(repeat * groups, (repeat + 1) * groups):
            await bus.publish(TRAJECTORIES, stamped(group, number, 0.0), key=f"share-{number}")
        publish_seconds.append(time.perf_counter() - started)
        publish_cpu.append(time.process_time() - cpu)
        started, cpu = time.perf_counter(), time.process_time()
        async with bus.read(TRAJECTORIES, after=after) as records:
            for _ in range(groups):
                await anext(records)
        read_seconds.append(time.perf_counter() - started)
        read_cpu.append(time.process_time() - cpu)
        await bus.trim(TRAJECTORIES, through=after + groups)
    await bus.close()
    publish, read = float(np.median(publish_seconds)), float(np.median(read_seconds))
    return Share(
        groups=groups,
        step_seconds=step_seconds,
        publish_seconds=round(publish, 4),
        read_seconds=round(read, 4),
        share=round((publish + read) / step_seconds, 5),
        publish_cpu_milliseconds=round(min(publish_cpu) / groups * 1e3, 3),
        read_cpu_milliseconds=round(min(read_cpu) / groups * 1e3, 3),
    )


# -- all of it ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    def said(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "command": " ".join(["python", "-m", "benchmarks.bus", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "server": said(find_binary(), "--version"),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
    }


def table_line(row: dict[str, Any], name: str) -> str:
    peak, half = row["peak"], row["half"]
    return (
        f"{row['storage']:<7} {name:>7} {row['publishers']:>4}   {peak['megabytes_per_second']:>8.1f} "
        f"{peak['groups_per_second']:>8.0f} {peak['p50_milliseconds']:>8.1f} {peak['p99_milliseconds']:>8.1f}   "
        f"{half['megabytes_per_second']:>8.1f} {half['p50_milliseconds']:>8.1f} {half['p99_milliseconds']:>8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 s: 64 kB and 300 kB, file, 1 and 4 publishers")
    parser.add_argument("--json", type=Path, help="write one object a line")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load (default 3)")
    parser.add_argument("--groups", type=int, default=64, help="300 kB groups of a batch (default 64)")
    parser.add_argument("--step-seconds", type=float, default=30.0, help="of a typical step (default 30)")
    parser.add_argument("--sync-seconds", type=float, default=1.0, help="bus.sync_seconds (default 1)")
    options = parser.parse_args()
    sizes = ["64 kB", "300 kB"] if options.quick else list(SIZES)
    storages: list[Storage] = ["file"] if options.quick else ["file", "memory"]
    counts = [1, 4] if options.quick else [1, 4, 16]
    seconds = min(options.seconds, 1.5) if options.quick else options.seconds

    numbers = itertools.count()  # for keys, so that no group is published twice
    rows: list[dict[str, Any]] = [{"machine": machine()}]
    print(rows[0]["machine"])
    print(f"{'':21}   {'peak':>17} {'':>17}   {'half of peak':>17}")
    print("storage    size publ       MB/s groups/s   p50 ms   p99 ms       MB/s   p50 ms   p99 ms")
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_in_its_own_process, args=(theirs,), daemon=True)
    reader.start()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(Path(folder), sync_seconds=options.sync_seconds) as server,
    ):
        for storage, name, publishers in itertools.product(storages, sizes, counts):
            row = uvloop.run(
                measure_row(
                    server,
                    ours,
                    storage=storage,
                    num_bytes=SIZES[name],
                    publishers=publishers,
                    seconds=seconds,
                    numbers=numbers,
                )
            )
            rows.append(row)
            print(table_line(row, name), flush=True)
        repeats = 3 if options.quick else 9
        share = uvloop.run(
            measure_share(
                server,
                groups=options.groups,
                step_seconds=options.step_seconds,
                repeats=repeats,
            )
        )
        rows.append({"share": asdict(share)})
        ours.send(None)
        reader.join()
    print(
        f"\nthe bus's share of a step of {share.step_seconds:g} s with {share.groups} groups of 300 kB: "
        f"publish {share.publish_seconds:.3f} s + read {share.read_seconds:.3f} s = {share.share:.2%} of it; the "
        f"client's CPU for one group: {share.publish_cpu_milliseconds:.2f} + {share.read_cpu_milliseconds:.2f} ms"
    )
    worst = max(row["half"]["p99_milliseconds"] for row in rows if 250_000 < row.get("message_bytes", 0) < 350_000)
    print(f"goal: p99 of 300 kB at half of peak <= {GOAL_MILLISECONDS:g} ms; worst here {worst:.1f} ms")
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
