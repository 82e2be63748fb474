"""Compare synchronous, one-step-off and asynchronous training on equally many machines: tokens trained per second.

    python -m benchmarks.pipeline                                      four to five minutes on two cores
    python -m benchmarks.pipeline --quick                              one length distribution, 40 seconds
    python -m benchmarks.pipeline --json docs/results/pipeline.jsonl   one object a line, for plot_pipeline.py

The loop is real: nats-server, JetStream, every actor, one bus connection per worker, real time. Only the model is
simulated: engines and trainer take time by a formula and compute nothing (simulated.py). Answers have the same lengths
in every arm, because lengths depend only on the seed.

N machines are split into workers and learner. Each mode runs at its best split (by asyncrl/planning/simulation.py).
Asynchronous training also runs with one worker less and one more, where generation or training is the bottleneck.
Synchronous training also runs colocated: all machines generate, then all train, and switching costs nothing.

The simulated model is a 7B model on H100s: one simulated token stands for 8 tokens, one simulated second for --speed
real ones. The cost of bus and actors is not scaled, so its share is that many times larger than in a real run; ``of
ideal`` shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import uvloop

from asyncrl.config.run import Mode
from asyncrl.planning.simulation import Ideal, Plan, Timing
from benchmarks.arm import Row, run_arm
from benchmarks.simulated import LENGTH_KINDS, LengthKind, Lengths, group_lengths

MODES: Final[tuple[Mode, ...]] = ("sync", "one_step_off", "async")
STARVED: Final = 0.05
"""If the event loop waited for a processor for more than this share of the time, the run says little about the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Parameters that all arms share. Lengths are in simulated tokens."""

    machines: int
    groups_per_batch: int
    group_size: int
    max_staleness: int
    length_mean: int
    length_max: int
    steps: int
    seed: int
    speed: float
    eviction: Literal["", "wait", "drop"] = ""

    def timing(self) -> Timing:
        """Per machine: a decode step of 8 ms + 0.1 ms per sequence, up to 256 sequences; 5,000 trained tokens/s."""
        tokens = 8.0  # tokens that one simulated token stands for
        return Timing(
            seconds_per_token=tokens * 8e-3 / self.speed,
            seconds_per_sequence=tokens * 1e-4 / self.speed,
            capacity=256,
            load_seconds=0.5 / self.speed,
            train_tokens_per_second=5000 / tokens * self.speed,
            train_seconds=1.0 / self.speed,
        )

    def plans(self, mode: Mode) -> list[Plan]:
        """Return one plan per split."""
        bound = {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[mode]
        warmup = 2 * (bound + 1)  # two full windows
        steps = self.steps * (2 if mode == "async" else 1)  # async steps are shorter
        plan = Plan(
            mode=mode,
            workers=self.machines,
            learner_machines=self.machines,
            groups_per_batch=self.groups_per_batch,
            group_size=self.group_size,
            max_staleness=bound,
            warmup=warmup,
            steps=warmup + steps,
            seed=self.seed,
            eviction=self.eviction if mode == "async" else "",
        )
        apart = [
            dataclasses.replace(plan, workers=workers, learner_machines=self.machines - workers)
            for workers in range(1, self.machines)
        ]
        return [*apart, plan] if mode == "sync" else apart


def measure(scene: Scene, *, mode: Mode, kind: LengthKind, sweep: str, tries: int) -> Iterator[Row]:
    """Yield the rows of one mode, each when it is done."""
    timing, lengths = scene.timing(), Lengths(kind, mean=scene.length_mean, maximum=scene.length_max)
    of_group = group_lengths(lengths, group_size=scene.group_size, seed=scene.seed)
    ideal = {plan: Ideal(plan, timing, of_group).tokens_per_second() for plan in scene.plans(mode)}
    for plan in chosen(ideal, sweep=sweep, machines=scene.machines):
        row = least_starved(plan, timing=timing, lengths=lengths, tries=tries)
        yield (
            {"lengths": kind, "machines": scene.machines}
            | row
            | {
                "ideal_tokens_per_second": ideal[plan],
                "of_ideal": row["tokens_per_second"] / ideal[plan],
                "ideal_by_workers": {
                    str(plan.workers): speed for plan, speed in ideal.items() if not is_colocated(plan, scene.machines)
                },
                "is_colocated": is_colocated(plan, scene.machines),
                "eviction": plan.eviction,
                "length_max": scene.length_max,
                "length_mean_generated": lengths.mean,
                "speed": scene.speed,
            }
        )


def least_starved(plan: Plan, *, timing: Timing, lengths: Lengths, tries: int) -> Row:
    """Return the row of the run that other programs disturbed least. Retries while the run is starved of processors."""
    rows: list[Row] = []
    while len(rows) < tries and min((row["starved_share"] for row in rows), default=1.0) > STARVED:
        rows.append(uvloop.run(run_arm(plan, timing=timing, lengths=lengths)))
    return min(rows, key=lambda row: float(row["starved_share"])) | {"tries": len(rows)}


def is_colocated(plan: Plan, machines: int) -> bool:
    """Return whether every machine generates, then trains."""
    return plan.workers + plan.learner_machines > machines


def chosen(ideal: Mapping[Plan, float], *, sweep: str, machines: int) -> list[Plan]:
    """Return the best split, for async also its neighbours, for sync also colocated; or all splits."""
    if sweep == "all":
        return list(ideal)
    best = max((plan for plan in ideal if not is_colocated(plan, machines)), key=lambda plan: ideal[plan])
    reach = 1 if sweep == "near" and best.mode == "async" else 0
    return [plan for plan in ideal if is_colocated(plan, machines) or abs(plan.workers - best.workers) <= reach]


HEAD = (
    "lengths    mode          workers+learner      tok/s  of ideal  learner idle  overhead  rollout idle"
    "  staleness mean  max  dropped  length  cpu  server  starved"
)


def line(row: Row) -> str:
    split = "colocated" if row["is_colocated"] else f"{row['workers']}+{row['learner_machines']}"
    flag = "*" if row["starved_share"] > STARVED else ""
    return (
        f"{row['lengths']:9s}  {row['mode']:12s}  {split:>15s}"
        f"  {row['tokens_per_second']:9,.0f}  {row['of_ideal']:8.2f}"
        f"  {row['learner_idle']:12.1%}  {row['learner_overhead']:8.1%}  {row['rollout_idle']:12.1%}"
        f"  {row['staleness_mean']:14.2f}  {row['staleness_max']:3d}  {row['dropped_groups']:7d}"
        f"  {row['length_mean']:6.0f}  {row['cpu_share']:3.0%}  {row['server_cpu_share']:6.0%}"
        f"  {row['starved_share']:7.1%}{flag}"
    )


def ratios(rows: Sequence[Row]) -> Iterator[str]:
    """Compare async with the other modes, each at its best split."""
    for kind in dict.fromkeys(row["lengths"] for row in rows):
        arms = {
            "sync colocated": [row for row in rows if row["lengths"] == kind and row["is_colocated"]],
            "sync apart": [row for row in _of(rows, kind, "sync") if not row["is_colocated"]],
            "one_step_off": _of(rows, kind, "one_step_off"),
        }
        own = _of(rows, kind, "async")
        for name, others in arms.items():
            if own and others:
                yield (
                    f"{kind:9s}  async / {name:14s}  {_ratio(own, others, 'tokens_per_second'):5.2f}x measured"
                    f"  {_ratio(own, others, 'ideal_tokens_per_second'):5.2f}x ideal"
                )


def _of(rows: Sequence[Row], kind: str, mode: str) -> list[Row]:
    return [row for row in rows if row["lengths"] == kind and row["mode"] == mode]


def _ratio(ours: Sequence[Row], others: Sequence[Row], key: str) -> float:
    return float(max(row[key] for row in ours) / max(row[key] for row in others))


def broken_promises(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["staleness_max"] > row["max_staleness"]:
            yield f"{row['mode']}: staleness {row['staleness_max']} over the bound {row['max_staleness']}"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=" ".join(MODES))
    add("--lengths", nargs="+", choices=LENGTH_KINDS, metavar="KIND", help=" ".join(LENGTH_KINDS))
    add("--machines", type=int, default=8, help="workers and learner together (default 8)")
    add("--steps", type=int, help="optimizer steps measured in an arm, async twice as many (default 7; quick 5)")
    add("--seed", type=int, default=0, help="of the lengths")
    add("--max-staleness", type=int, default=4, help="of async (default 4)")
    add(
        "--eviction",
        choices=("wait", "drop"),
        default="",
        help="of async (default: wait)",
    )
    add("--groups", type=int, default=32, help="groups per batch (default 32)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--length-mean", type=int, default=250, help="tokens of an answer (default 250)")
    add("--length-max", type=int, default=1000, help="where lengths are cut (default 1000)")
    add("--speed", type=float, help="real seconds in a simulated one (default 50; quick 100)")
    add(
        "--sweep",
        choices=("best", "near", "all"),
        help="splits: the best; near: async also beside it, for the first lengths (default); all",
    )
    add("--tries", type=int, default=1, help="times an arm may run when other programs starve it of processors")
    add("--quick", action="store_true", help="lognormal lengths, best splits")
    add("--json", type=Path, metavar="FILE", help="write the rows there, one object a line")
    options = parser.parse_args(given)
    if options.machines < 2:
        parser.error("--machines must be at least 2: one generates and one trains")
    options.lengths = options.lengths or (LENGTH_KINDS[:1] if options.quick else LENGTH_KINDS)
    options.steps = options.steps or (5 if options.quick else 7)
    options.speed = options.speed or (100.0 if options.quick else 50.0)
    options.sweep = options.sweep or ("best" if options.quick else "near")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if the staleness bound was exceeded, 130 at Ctrl-C."""
    options = arguments(given)
    scene = Scene(
        machines=options.machines,
        groups_per_batch=options.groups,
        group_size=options.group_size,
        max_staleness=options.max_staleness,
        length_mean=options.length_mean,
        length_max=options.length_max,
        steps=options.steps,
        seed=options.seed,
        speed=options.speed,
        eviction=options.eviction,
    )
    started = time.monotonic()
    rows: list[Row] = []
    print(HEAD)
    try:
        for kind, mode in itertools.product(options.lengths, options.modes):
            sweep = "best" if options.sweep == "near" and kind != options.lengths[0] else options.sweep
            for row in measure(scene, mode=mode, kind=kind, sweep=sweep, tries=options.tries):
                rows.append(row)
                print(line(row), flush=True)
    except asyncio.CancelledError:
        return 130
    print("", *ratios(rows), sep="\n")
    if any(row["starved_share"] > STARVED for row in rows):
        print(f"* starved: waited over {STARVED:.0%} of the time for a processor; use a quiet machine, or --tries 3")
    print(f"\n{time.monotonic() - started:.0f} s")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = list(broken_promises(rows))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
