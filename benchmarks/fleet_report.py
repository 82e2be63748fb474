"""The results of fleet.py as readable lines, and where the cost is not flat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Row = dict[str, Any]

FLAT: Final = 0.2


HEAD = (
    "         traj/s   CPU ms per trajectory                        per trajectory"
    "   presence, per s    MB at most (per min)\n"
    "workers        server workers learner watcher  whole   work   messages     kB"
    "   CPU ms  messages   server      learner"
)


def line(row: Row) -> str:
    cpu, rss = row["whole"]["cpu_milliseconds"], row["memory"]
    return (
        f"{row['workers']:7d} {row['trajectories_per_second']:6.0f} {cpu['server']:7.3f} {cpu['workers']:7.3f}"
        f" {cpu['learner']:7.3f} {cpu['watcher']:7.3f} {cpu['all']:6.2f} {row['work']['cpu_milliseconds']['all']:6.2f}"
        f"   {row['whole']['messages']:8.2f} {row['whole']['bytes'] / 1e3:6.2f}"
        f"   {1e3 * sum(row['presence']['cpu'].values()):6.0f} {row['presence']['messages']:9.0f}"
        f"   {rss['server']['max_megabytes']:4.0f} ({rss['server']['megabytes_per_minute']:+.1f})"
        f"  {rss['learner']['max_megabytes']:4.0f} ({rss['learner']['megabytes_per_minute']:+.1f})"
    )


def flatness(rows: Sequence[Row]) -> Iterator[str]:
    """Compare each fleet with the smallest; yield each cost that is not flat, and by how much."""
    for row in rows[1:]:
        for of in ("whole", "work"):
            for name, pick in _COSTS.items():
                ratio = pick(row[of]) / pick(rows[0][of])
                if abs(ratio - 1) > FLAT:
                    yield f"{row['workers']} workers: {of}, {name}: {ratio:.2f} times that of {rows[0]['workers']}"


_COSTS: Final[Mapping[str, Any]] = {
    "server CPU": lambda cost: cost["cpu_milliseconds"]["server"],
    "workers' CPU": lambda cost: cost["cpu_milliseconds"]["workers"],
    "learner's CPU": lambda cost: cost["cpu_milliseconds"]["learner"],
    "CPU in all": lambda cost: cost["cpu_milliseconds"]["all"],
    "messages": lambda cost: cost["messages"],
    "bytes": lambda cost: cost["bytes"],
}


def load(reading: Row) -> str:
    cpu = "  ".join(f"{name} {share:.1%}" for name, share in reading["cpu"].items())
    return f"{reading['messages']:,.0f} messages/s  {reading['bytes'] / 1e6:.2f} MB/s  CPU: {cpu}"
