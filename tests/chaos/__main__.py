"""bin/chaos: a storm of any length, its table, and the audit at its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.storm import Kill, Storm
from tests.chaos.victims import KINDS


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value with at least ``share`` of all at or below it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(kills: Sequence[Kill]) -> list[dict[str, Any]]:
    """A row for each kind: how often, and how long until all was as before."""
    rows = []
    for kind in KINDS:
        seconds = [kill.seconds for kill in kills if kill.kind == kind]
        if seconds:
            p50, p95 = quantile(seconds, 0.5), quantile(seconds, 0.95)
            rows.append({"killed": str(kind), "kills": len(seconds), "p50": p50, "p95": p95, "worst": max(seconds)})
    return rows


def main() -> int:
    """Exit code 1 when somebody did not come back, or a group was lost, trained twice, or too stale."""
    parser = argparse.ArgumentParser(prog="bin/chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="(default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="kills, table and audit, one object a line")
    parser.add_argument("--folder", type=Path, help="where the run goes (default: a folder that is removed)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        storm = Storm(folder, seed=options.seed)
        started = time.monotonic()
        problem, audit = "", {}
        try:
            audit = asyncio.run(storm.blow(options.kills))
        except AssertionError as error:
            problem = str(error)
        except KeyboardInterrupt:
            problem = "interrupted"
        seconds = time.monotonic() - started
    rows = table(storm.kills)
    print(f"\n{'killed':40s} {'kills':>6s} {'p50 s':>7s} {'p95 s':>7s} {'worst s':>8s}")
    for row in rows:
        print(f"{row['killed']:40s} {row['kills']:6d} {row['p50']:7.1f} {row['p95']:7.1f} {row['worst']:8.1f}")
    print(f"{len(storm.kills)} kills in {seconds:.0f} s; `asyncrl run` was started {storm.runs} times")
    print(problem or json.dumps(audit))
    if options.json:
        lines = [{"seed": options.seed, "seconds": seconds, "problem": problem, "audit": audit}, *rows]
        lines += [
            {"kill": str(kill.kind), "seconds": round(kill.seconds, 3), "step": kill.step} for kill in storm.kills
        ]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 1 if problem or audit.get("exit_code") != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
