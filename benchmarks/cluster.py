"""Measure how long each kind of call waits when a server of a three-node NATS cluster is killed.

    python -m benchmarks.cluster --kills 6 --json docs/results/cluster.jsonl

Three servers run on loopback with the configuration of bin/nats-config --cluster and three replicas of everything. Each
round kills a server (SIGKILL): the leader of the trajectory log, the leader of the prompts, or the server that the
client is connected to. It then makes one call of each kind concurrently, and restarts the server when all have
returned. A call whose server was not killed takes milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.messages import Progress
from asyncrl.messages.topics import PROGRESS, PROMPTS, TRAJECTORIES
from tests.harness.buses import group, progress, prompt
from tests.harness.nats_cluster import Cluster, leader, server_of

VICTIMS: Final = ("leads the log", "leads the prompts", "is connected to")


async def _round(cluster: Cluster, bus: JetStreamBus, worker: JetStreamBus, number: int) -> dict[str, float]:
    """Kill one server, and return the seconds that each call takes."""
    seconds: dict[str, float] = {}

    async def timed(name: str, call: Awaitable[Any]) -> Any:
        began = time.monotonic()
        result = await call
        seconds[name] = time.monotonic() - began
        return result

    async def lease() -> None:
        async with worker.lease("load", holder="w"):
            pass

    async def until(states: Any, step: int) -> Progress:
        return next_state if (next_state := await anext(states)).step == step else await until(states, step)

    victim = [
        await leader(bus, bus._layout.stream(TRAJECTORIES)),
        await leader(bus, bus._layout.stream(PROMPTS)),
        server_of(bus),
    ][number % len(VICTIMS)]
    last = await bus.last_sequence(TRAJECTORIES)
    async with (
        worker.consume(PROMPTS) as prompts,
        bus.read(TRAJECTORIES, after=last) as records,
        worker.watch(PROGRESS) as states,
    ):
        await bus.put(PROGRESS, progress(2 * number))
        await until(states, 2 * number)
        waiting = {"next prompt": anext(prompts), "next record": anext(records), "next state": anext(states)}
        calls = [asyncio.ensure_future(timed(name, call)) for name, call in waiting.items()]
        await bus.depth(PROMPTS)  # by then the calls wait at the server
        cluster.kill(victim)
        calls += [
            asyncio.ensure_future(timed("publish a group", bus.publish(TRAJECTORIES, group(number), key=str(number)))),
            asyncio.ensure_future(timed("publish a prompt", bus.publish(PROMPTS, prompt(number), key=str(number)))),
            asyncio.ensure_future(timed("put a state", bus.put(PROGRESS, progress(2 * number + 1)))),
            asyncio.ensure_future(timed("read states", bus.states(PROGRESS))),
            asyncio.ensure_future(timed("take and leave a lease", lease())),
        ]
        delivery, record, state, *_ = await asyncio.gather(*calls)
        await timed("ack", delivery.ack())
        assert (delivery.key, record.key, state.step) == (str(number), str(number), 2 * number + 1)
    began = time.monotonic()
    cluster.start(victim)
    await cluster.until_whole(bus)
    return seconds | {"whole again after its start": time.monotonic() - began}


async def measure(kills: int) -> list[dict[str, float]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        Cluster(Path(folder) / "cluster", runs=("bench",)) as cluster,
    ):
        async with cluster.bus("bench") as bus, cluster.bus("bench") as worker:
            await cluster.until_whole(bus)
            return [await _round(cluster, bus, worker, number) for number in range(kills)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--kills", type=int, default=6, help="(default 6)")
    parser.add_argument("--json", type=Path, help="write the rounds there, one object a line")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rounds = asyncio.run(measure(options.kills))
    if options.json:
        rows = [{"killed": VICTIMS[at % len(VICTIMS)]} | seconds for at, seconds in enumerate(rounds)]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{'seconds':28s} {'p50':>6s} {'worst':>6s}   of {len(rounds)} kills")
    for name in sorted(rounds[0]):
        values = [seconds[name] for seconds in rounds]
        print(f"{name:28s} {statistics.median(values):6.2f} {max(values):6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
