"""Measure the cost of signatures for the throughput of the bus, end to end: the same load with and without, in turns.

    python -m benchmarks.signed_bus [--pairs 20] [--seconds 1.0] [--publishers 4] [--size "300 kB"] [--json FILE]

Each pair is two peaks of benchmarks.bus on the same server, one signed and one unsigned. The order alternates, so that
slow changes of the machine affect both equally. Prints the median of the pairs' ratios with its 95 % interval
(bootstrap), and the share of a core that each of the two clients uses. If neither is near 100 %, the server or its disk
limits the bus, and a signature costs CPU but no throughput.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import psutil
import uvloop

from asyncrl.bus.nats_server.server import EmbeddedServer
from benchmarks.bus import SIZES, machine, make_group, measure, open_bus, read_in_its_own_process

GOAL: Final = 0.01
RESAMPLES: Final = 2000


async def peak(
    server: EmbeddedServer,
    pipe: Connection,
    reader: int,
    *,
    num_bytes: int,
    publishers: int,
    seconds: float,
    numbers: Iterator[int],
    is_signed: bool,
) -> dict[str, float]:
    """Measure one peak. CPU shares are of one core, from the first publish until the last group is read.

    reader  process id of the reader
    """
    address: dict[str, Any] = {"url": server.url, "token": server.token, "run": "bench", "storage": "file"}
    address["is_signed"] = is_signed
    buses = [await open_bus(**address) for _ in range(publishers)]
    before, cpu, started = _cpu_seconds(reader), time.process_time(), time.perf_counter()
    load = await measure(buses, pipe, make_group(num_bytes), address=address, seconds=seconds, numbers=numbers)
    took = time.perf_counter() - started
    row = {
        "groups_per_second": load.groups_per_second,
        "megabytes_per_second": load.megabytes_per_second,
        "publishers_share": round((time.process_time() - cpu) / took, 3),
        "reader_share": round((_cpu_seconds(reader) - before) / took, 3),
    }
    for bus in buses:
        await bus.close()
    return row


def _cpu_seconds(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


def interval(ratios: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of the median."""
    drawn = np.random.default_rng(seed).choice(np.asarray(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="(default 20)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each peak (default 1)")
    parser.add_argument("--publishers", type=int, default=4, help="connections that publish (default 4)")
    parser.add_argument("--size", choices=SIZES, default="300 kB", help='(default "300 kB")')
    parser.add_argument("--json", type=Path, help="write one object a line")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [{"machine": machine() | {"command": f"python -m benchmarks.signed_bus {options}"}}]
    print(rows[0]["machine"])
    numbers, context = itertools.count(), multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read_in_its_own_process, args=(theirs,), daemon=True)
    reader.start()
    assert reader.pid is not None
    with TemporaryDirectory() as folder, EmbeddedServer(Path(folder), sync_seconds=1.0) as server:
        for pair in range(options.pairs + 1):
            row = {}
            for is_signed in (True, False) if pair % 2 else (False, True):
                row["signed" if is_signed else "unsigned"] = uvloop.run(
                    peak(
                        server,
                        ours,
                        reader.pid,
                        num_bytes=SIZES[options.size],
                        publishers=options.publishers,
                        seconds=options.seconds,
                        numbers=numbers,
                        is_signed=is_signed,
                    )
                )
            if pair:  # the first pair warms up the server and both processes
                rows.append(row)
        ours.send(None)
        reader.join()
    pairs = rows[1:]
    for kind in ("unsigned", "signed"):
        middle = {name: float(np.median([row[kind][name] for row in pairs])) for name in pairs[0][kind]}
        print(f"{kind:>9}  " + "  ".join(f"{name} {value:g}" for name, value in middle.items()))
    ratios = [row["signed"]["groups_per_second"] / row["unsigned"]["groups_per_second"] for row in pairs]
    low, high = interval(ratios)
    cost = 1 - float(np.median(ratios))
    rows.append({"cost": round(cost, 4), "low": round(1 - high, 4), "high": round(1 - low, 4), "pairs": len(pairs)})
    print(f"signatures cost {cost:.1%} of the throughput ({1 - high:.1%} to {1 - low:.1%}); goal {GOAL:.0%}")
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
