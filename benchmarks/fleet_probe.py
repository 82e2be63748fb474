"""Readings of a run's processes and its nats-server, and differences between two readings. Linux only."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.bus.nats_server.server import EmbeddedServer

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class MonitoredServer(EmbeddedServer):
    """An EmbeddedServer with the HTTP monitor that counts messages."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._monitor = free.getsockname()[1]

    def _write_config(self) -> Path:
        path = super()._write_config()
        with path.open("a") as config:
            config.write(f'http: "127.0.0.1:{self._monitor}"\n')
        return path

    def counts(self) -> dict[str, int]:
        """Return messages and bytes that clients sent (in) and received (out), connections and subscriptions."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/varz", timeout=30) as answer:
            found = json.load(answer)
        return {name: int(found[name]) for name in COUNTS}


COUNTS: Final = ("in_msgs", "out_msgs", "in_bytes", "out_bytes", "connections", "subscriptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading.

    cpu_seconds, rss_bytes  per part, the sum over its processes
    """

    at: float
    counts: Mapping[str, int]
    cpu_seconds: Mapping[str, float]
    rss_bytes: Mapping[str, int]


def read(parts: Mapping[str, Sequence[int]], server: MonitoredServer, *, at: float) -> Reading:
    """Take a reading.

    parts  name -> process ids
    """
    return Reading(
        at=at,
        counts=server.counts(),
        cpu_seconds={name: sum(map(cpu_seconds, pids)) for name, pids in parts.items()},
        rss_bytes={name: sum(map(rss_bytes, pids)) for name, pids in parts.items()},
    )


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def between(first: Reading, last: Reading) -> dict[str, Any]:
    """Return rates per second: CPU seconds of each part, and messages and bytes at the server (in plus out)."""
    seconds = last.at - first.at
    delta = {name: last.counts[name] - first.counts[name] for name in COUNTS}
    return {
        "seconds": seconds,
        "cpu": {name: (last.cpu_seconds[name] - first.cpu_seconds[name]) / seconds for name in first.cpu_seconds},
        "messages": (delta["in_msgs"] + delta["out_msgs"]) / seconds,
        "bytes": (delta["in_bytes"] + delta["out_bytes"]) / seconds,
    }


def memory(readings: Sequence[Reading]) -> dict[str, dict[str, float]]:
    """Return for each part the maximum megabytes, and the megabytes per minute of a least-squares line."""
    times = np.array([reading.at for reading in readings])
    found = {}
    for part in readings[0].rss_bytes:
        sizes = np.array([reading.rss_bytes[part] for reading in readings]) / 1e6
        slope = float(np.polyfit(times, sizes, 1)[0]) * 60 if len(sizes) > 1 else 0.0
        found[part] = {"max_megabytes": float(sizes.max()), "megabytes_per_minute": slope}
    return found
