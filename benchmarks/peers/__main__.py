"""Compare the loops of asyncrl and its peers, each with its own queue, on a scripted engine and a timed learner.

    python -m benchmarks.peers --folder DIR --arms asyncrl areal   installs the peer in DIR; one scene, two minutes
    python -m benchmarks.peers --folder DIR --scenes all --json docs/results/peers.jsonl

Every peer's package or source is fetched into DIR (pip, git) and runs in its own process. Engine speed, learner time,
prompts and answers are the same for all. docs/results/performance.md says what the comparison shows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.peers.bring_up import PEERS, run_peer
from benchmarks.peers.engine import lengths_of
from benchmarks.peers.ours import run_ours
from benchmarks.peers.scene import SCENES, Row, Scene

OURS: Final[dict[str, Callable[[Scene], Row]]] = {
    "asyncrl": lambda scene: run_ours(scene, mode="async"),
    "asyncrl full": lambda scene: run_ours(scene, mode="async", opens="full"),
    "asyncrl bound 8": lambda scene: run_ours(scene, mode="async", max_staleness=8),
    "asyncrl drop": lambda scene: run_ours(scene, mode="async", eviction="drop"),
    "asyncrl tokens": lambda scene: run_ours(scene, mode="async", discard="tokens"),
    "asyncrl tokens 8": lambda scene: run_ours(scene, mode="async", discard="tokens", max_staleness=8),
    "sync apart": lambda scene: run_ours(scene, mode="sync"),
    "sync colocated": lambda scene: run_ours(scene, mode="sync", is_colocated=True),
}

ARMS: Final = (*OURS, *PEERS)

HEAD: Final = (
    "scene          arm             samples/s  of ideal  thrown away  left out  staleness mean  max  over bound  "
    "length  learner idle  overhead  engine busy  cpu"
)


def measure(arm: str, scenes: Sequence[Scene], *, folder: Path, limit: float) -> Iterator[Row]:
    """Yield the rows of an arm, one per scene. A failed scene gives a row with the error."""
    command = shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    rows = map(OURS[arm], scenes) if arm in OURS else run_peer(arm, scenes, folder=folder, limit=limit)
    for scene, row in zip(scenes, rows, strict=True):
        ideal = scene.ideal_tokens_per_second(lengths_of(scene).mean)
        head = {"scene": scene.name, "arm": arm, "max_staleness": scene.max_staleness}
        head |= {"ideal_tokens_per_second": ideal, "length_mean_drawn": lengths_of(scene).mean}
        if "failed" not in row:
            head["of_ideal"] = row["tokens_per_second"] / ideal
        yield head | row | {"command": command}


def line(row: Row) -> str:
    head = f"{row['scene']:13s}  {row['arm']:14s}"
    if "failed" in row:
        return f"{head}  {row['failed']}"
    over = row["tokens_over_bound_share"]
    return (
        f"{head}  {row['samples_per_second']:9.1f}  {row['of_ideal']:8.2f}  {row['thrown_away_share']:11.1%}"
        f"  {row.get('left_out_share', 0.0):8.1%}"
        f"  {row['staleness_mean']:14.2f}  {row['staleness_max']:3d}  {0 if over is None else over:10.1%}"
        f"  {row['length_mean']:6.0f}  {row['learner_idle']:12.1%}  {row['learner_overhead']:8.1%}"
        f"  {row['engine_busy']:11.1%}  {row['cpu_share']:4.0%}"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="where peers are installed, and their logs")
    add("--arms", nargs="+", choices=ARMS, default=ARMS[:-1], metavar="ARM", help=", ".join(ARMS))
    add("--scenes", nargs="+", choices=[*SCENES, "all"], default=["balanced"], metavar="SCENE", help=", ".join(SCENES))
    add("--steps", type=int, help="optimizer steps measured in an arm (default 12)")
    add("--limit", type=float, default=600, help="seconds that a peer may take for a scene, installation not counted")
    add("--json", type=Path, metavar="FILE", help="append the rows there, one object a line")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    names = list(SCENES) if "all" in options.scenes else options.scenes
    scenes = [replace(SCENES[name], steps=options.steps or SCENES[name].steps) for name in names]
    failed = False
    print(HEAD)
    for arm in options.arms:
        for row in measure(arm, scenes, folder=options.folder, limit=options.limit):
            print(line(row), flush=True)
            failed |= "failed" in row
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
