"""bin/chaos: run concurrent storms, print one table of their kills, and sum their audits."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.chaos import report
from tests.chaos.kill import Kill
from tests.chaos.run_files import ANSWERS, CALM, evaluating
from tests.chaos.storm import Storm
from tests.chaos.victims import FAULTS
from tests.harness.forked import ForkServer
from tests.harness.ports import free_ports

_SEEDS: Final = 1000


def main() -> int:
    """Return 1 if a process did not come back, or if a group was lost, trained twice, or too stale."""
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
    parser.add_argument("--kills", type=int, default=1000, help="total kills (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, metavar="K", help="concurrent runs (default 1)")
    parser.add_argument(
        "--answers",
        choices=ANSWERS,
        help="answers of 6 tokens (default), of 400, or of 16 of a mixture whose learner has four ranks (with --faults "
        "ranks)",
    )
    parser.add_argument(
        "--faults",
        choices=FAULTS,
        default="kills",
        help="kills (default), victims (each killed once, at any time), "
        "others (stopped for 5 to 40 s, killed while renaming, twice in a row, all at once), "
        "resources (no disk, descriptors or memory for 5 to 15 s, clocks set back), all; "
        "disks (small file systems of the run's own, filled); "
        "ranks (a learner's, and all of one machine, killed and stopped); "
        "swaps, promotions (a kill while another learner takes over), calm (the same without a victim)",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="those of its kinds whose name contains this")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the run file")
    parser.add_argument("--forked", action="store_true", help="start by fork, without imports: many more kills")
    parser.add_argument("--liar", action="store_true", help="a worker in each run answers prompts with lies")
    parser.add_argument("--evaluate", choices=("shared", "dedicated"), help="evaluate in each run all the time")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="stop killing after this, then finish")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line per kill as it happens, then the totals")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: a temporary one)")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # set for each of several concurrent storms
    options = parser.parse_args()
    options.answers = options.answers or ("ranks" if options.faults == "ranks" else "short")
    if (options.answers == "ranks") != (options.faults == "ranks"):
        parser.error("--faults ranks and --answers ranks go together")
    return options


def one(options: argparse.Namespace, folder: Path) -> int:
    """Run a single storm in this process."""

    def note(kill: Kill) -> None:
        report.append(options.json, {"storm": options.seed} | kill.as_json())

    def say(text: str) -> None:
        print(f"[{options.seed}] {text}", flush=True)

    overrides = [*options.set, *(evaluating(folder.absolute(), options.evaluate) if options.evaluate else [])]
    if options.answers == "short" and any(kind.hand_over for kind in FAULTS[options.faults]):
        overrides.append(CALM)  # a shadow has to keep up
    forks = ForkServer(folder, ANSWERS[options.answers].modules) if options.forked else None
    storm = Storm(
        folder,
        seed=options.seed,
        answers=options.answers,
        faults=options.faults,
        only=options.only,
        port=options.port,
        forks=forks,
        say=say,
        note=note,
        has_liar=options.liar,
        overrides=overrides,
    )
    started = time.monotonic()
    problem, audit = "", {}
    try:
        with storm.disks():
            audit = asyncio.run(storm.blow(options.kills, limit_seconds=options.limit_seconds))
    except AssertionError as error:
        problem = f"storm {options.seed}: {error}"
    except KeyboardInterrupt:
        problem = f"storm {options.seed}: interrupted"
    finally:
        if forks is not None:
            forks.close()
    if options.liar and not problem and (failed := storm.honest_groups_failed()):
        problem = f"storm {options.seed}: honest groups failed: {failed}"
    end = {"seconds": round(time.monotonic() - started, 1), "runs": storm.runs, "problem": problem}
    if options.liar:
        end |= {"lies": storm.lies, "honest": len(storm.seen.honest)}
    # the liar's tokens have no engine; evaluation tokens are in no group
    is_counted = not (options.liar or options.evaluate)
    tokens = storm.tokens if is_counted else {}
    row = {"storm": options.seed} | end | {"tokens": tokens, "audit": audit}
    report.append(options.json, row)
    say(problem or f"{len(storm.kills)} kills; " + ("clean" if report.is_clean(row) else f"NOT CLEAN: {audit}"))
    return 0 if report.is_clean(row) else 1


def side_by_side(options: argparse.Namespace, folder: Path, path: Path) -> None:
    """Start one process per storm, with its own folder, port and seed."""
    running = []
    for number, port in enumerate(free_ports(options.at_once, seed=options.seed)):
        kills = options.kills // options.at_once + (number < options.kills % options.at_once)
        words = {
            "--kills": kills,
            "--seed": options.seed * _SEEDS + number,
            "--limit-seconds": options.limit_seconds,
            "--answers": options.answers,
            "--faults": options.faults,
            "--only": options.only,
            "--json": path,
            "--folder": folder / f"storm-{number}",
            "--port": port,
        }
        flags = [f"--{name}" for name in ("forked", "liar") if getattr(options, name)]
        flags += ["--evaluate", options.evaluate] if options.evaluate else []
        flags += [word for item in options.set for word in ("--set", item)]
        command = [sys.executable, "-m", "tests.chaos", *flags, *(str(word) for pair in words.items() for word in pair)]
        running.append(subprocess.Popen(command))
    try:
        for process in running:
            process.wait()
    except KeyboardInterrupt:  # the storms received the interrupt and record their progress
        for process in running:
            process.send_signal(signal.SIGINT)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
