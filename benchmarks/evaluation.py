"""Measure the cost of continuous evaluation for training: trained tokens per second without evaluation, with separate
evaluation engines, and with engines shared with training.

    python -m benchmarks.evaluation                            four minutes on two cores
    python -m benchmarks.evaluation --json docs/results/evaluation.jsonl

The loop and the model are those of benchmarks.pipeline, asynchronous at its best split. They run slower, so that the
CPU of the additional engines does not slow down the loop. Each evaluation starts when the previous one ends. Exit code
1 if training keeps less than 97 % of its tokens per second with separate engines, or loses more than the share with
shared engines, or if any answer was mixed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

import uvloop

from asyncrl.planning.ideal import Ideal
from benchmarks.arm import Evaluating, Row, run_arm
from benchmarks.pipeline import Scene, chosen
from benchmarks.simulated import Lengths, group_lengths

LEAST_BESIDE: Final = 0.97
HEAD: Final = (
    "evaluation  workers+learner      tok/s    kept  evaluations  evaluated tok  engine share  staleness max  dropped"
    "  starved"
)


def _line(row: Row) -> str:
    return (
        f"{row['evaluation']:10s}  {row['workers']:7d}+{row['learner_machines']:<7d}  {row['tokens_per_second']:9,.0f}"
        f"  {row['kept']:6.1%}  {row['evaluations_complete']:11d}  {row['evaluation_tokens']:13,.0f}"
        f"  {row['evaluation_engine_share']:12.1%}  {row['staleness_max']:13d}  {row['dropped_groups']:7d}"
        f"  {row['starved_share']:7.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machines", type=int, default=8, help="of training, workers and learner (default 8)")
    parser.add_argument("--prompts", type=int, default=256, help="of an evaluation (default 256)")
    parser.add_argument("--share", type=float, default=0.25, help="of place = shared (default 0.25)")
    parser.add_argument("--steps", type=int, default=7, help="half of the optimizer steps measured (default 7)")
    parser.add_argument("--tries", type=int, default=1, help="runs of each arm, of which the median counts (default 1)")
    parser.add_argument("--speed", type=float, default=12.0, help="real seconds in a simulated one (default 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, one object a line")
    options = parser.parse_args()
    scene = Scene(
        machines=options.machines,
        groups_per_batch=32,
        group_size=8,
        max_staleness=4,
        length_mean=250,
        length_max=1000,
        steps=options.steps,
        seed=0,
        speed=options.speed,
    )
    timing, lengths = scene.timing(), Lengths("lognormal", mean=scene.length_mean, maximum=scene.length_max)
    of_group = group_lengths(lengths, group_size=scene.group_size, seed=scene.seed)
    ideal = {plan: Ideal(plan, timing, of_group).tokens_per_second() for plan in scene.plans("async")}
    (plan,) = chosen(ideal, sweep="best")
    arms = {
        "none": None,
        "dedicated": Evaluating(num_prompts=options.prompts, engines=1),
        "shared": Evaluating(num_prompts=options.prompts, share=options.share),
    }
    rows: list[Row] = []
    tried: dict[str, list[Row]] = {name: [] for name in arms}
    for _ in range(options.tries):  # in turns, so that other load on the machine affects all of them
        for name, evaluating in arms.items():
            found = uvloop.run(run_arm(plan, timing=timing, lengths=lengths, evaluating=evaluating))
            tried[name].append({"evaluation": name, "machines": scene.machines, "speed": scene.speed} | found)
    print(HEAD)
    for found_of in tried.values():
        row = sorted(found_of, key=lambda one: float(one["tokens_per_second"]))[len(found_of) // 2]
        rows.append(row | {"kept": row["tokens_per_second"] / (rows or [row])[0]["tokens_per_second"]})
        print(_line(rows[-1]))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = max(1, int(options.share * plan.workers)) / plan.workers
    problems = [f"dedicated keeps {rows[1]['kept']:.1%} of the tokens"] if rows[1]["kept"] < LEAST_BESIDE else []
    problems += [f"shared keeps {rows[2]['kept']:.1%}"] if rows[2]["kept"] < 1 - max(held, options.share) else []
    problems += [f"{row['evaluation']}: mixed answers" for row in rows if row["evaluation_mixed"]]
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
