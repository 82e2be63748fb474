"""bin/chaos: storms side by side, their kills in one table, and the sum of their audits."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos import report
from tests.chaos.run_files import ANSWERS
from tests.chaos.storm import Kill, Storm

_PORTS: Final = range(10_000, 30_000)
"""Below those that the system gives away itself: a nats-server that was killed comes back to its own."""
_SEEDS: Final = 1000


def main() -> int:
    """Exit code 1 when somebody did not come back, or a group was lost, trained twice, or too stale."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.port is not None:
            return one(options, folder)
        path = options.json or folder / "storms.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        side_by_side(options, folder, path)
        rows = report.read(path)
        summary = report.total(rows, asked=options.kills, storms=options.at_once)
        for row in (summary, *report.table(rows)):
            report.append(path, row)
    print("\n" + report.show(rows, summary))
    return 0 if summary["clean"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bin/chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="in all (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, metavar="K", help="runs that share the kills (default 1)")
    parser.add_argument("--answers", choices=ANSWERS, default="short", help="of 6 tokens (default) or of 400")
    parser.add_argument("--forked", action="store_true", help="start processes by fork: no imports, many more kills")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="kill no more after this; then finish")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line for each kill as it comes, then the sums")
    parser.add_argument("--folder", type=Path, help="where the runs go (default: a folder that is removed)")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # one storm, of many side by side
    return parser.parse_args()


def one(options: argparse.Namespace, folder: Path) -> int:
    """A single storm, in this process."""

    def note(kill: Kill) -> None:
        report.append(options.json, {"storm": options.seed} | kill.as_json())

    def say(text: str) -> None:
        print(f"[{options.seed}] {text}", flush=True)

    storm = Storm(
        folder,
        seed=options.seed,
        answers=options.answers,
        port=options.port,
        is_forked=options.forked,
        say=say,
        note=note,
    )
    started = time.monotonic()
    problem, audit = "", {}
    try:
        audit = asyncio.run(storm.blow(options.kills, limit_seconds=options.limit_seconds))
    except AssertionError as error:
        problem = f"storm {options.seed}: {error}"
    except KeyboardInterrupt:
        problem = f"storm {options.seed}: interrupted"
    end = {"seconds": round(time.monotonic() - started, 1), "runs": storm.runs, "problem": problem}
    row = {"storm": options.seed} | end | {"tokens": storm.tokens, "audit": audit}
    report.append(options.json, row)
    say(problem or f"{len(storm.kills)} kills; " + ("clean" if report.is_clean(row) else f"NOT CLEAN: {audit}"))
    return 0 if report.is_clean(row) else 1


def side_by_side(options: argparse.Namespace, folder: Path, path: Path) -> None:
    """A process for each storm, with its own folder, port and seed."""
    running = []
    for number, port in enumerate(free_ports(options.at_once, seed=options.seed)):
        kills = options.kills // options.at_once + (number < options.kills % options.at_once)
        words = {
            "--kills": kills,
            "--seed": options.seed * _SEEDS + number,
            "--limit-seconds": options.limit_seconds,
            "--answers": options.answers,
            "--json": path,
            "--folder": folder / f"storm-{number}",
            "--port": port,
        }
        flags = ["--forked"] if options.forked else []
        command = [sys.executable, "-m", "tests.chaos", *flags, *(str(word) for pair in words.items() for word in pair)]
        running.append(subprocess.Popen(command))
    try:
        for process in running:
            process.wait()
    except KeyboardInterrupt:  # it came to them too: they note how far they got
        for process in running:
            process.send_signal(signal.SIGINT)
            process.wait()


def free_ports(count: int, *, seed: int) -> Sequence[int]:
    """Different ones that nobody listens on."""
    found: list[int] = []
    for port in random.Random(seed).sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found


if __name__ == "__main__":
    sys.exit(main())
