"""Make the table: held-out reward by learning rate, staleness and guard, at equal samples and at equal seconds.

    python -m benchmarks.old_tokens --json docs/results/old_tokens.jsonl             tiny tasks on a CPU, in minutes
    python -m benchmarks.old_tokens --product --guards --seeds 0 --json FILE         the same, by the product's backend
    python -m benchmarks.old_tokens --model DIR --device cuda --rates 5e-6 1e-5 2e-5 4e-5 --guard-rate 2e-5 --json FILE
                                                                                     a real model, on a GPU
    python -m benchmarks.old_tokens --json FILE --print                              the tables of what is there
    python -m benchmarks.old_tokens.plot docs/results/old_tokens.jsonl docs/results/old_tokens.png
    python -m benchmarks.old_tokens.alarm docs/results/gpu/learning*.jsonl           error rates of the drift alarm
    python -m benchmarks.old_tokens.real_loop --json docs/results/drift_alarm.jsonl    the same in runs of the real loop

One row a run. A run whose row is there is not repeated, so a stopped command goes on where it was. Runs are
interleaved: all arms of seed 0, then of seed 1. cells.py says what a run is, tasks.py the tasks, guards.py the guards,
arms.py how all tiny runs of a task and a seed are made at once, loop.py how a run of a real model is made. Every guard
runs at --guard-rate and --guard-staleness; "tis" is the default, without one.

Seeds of the table are 0, 1, 2, ...; what was chosen by trying (tasks, rates, steps) was tried with seeds from 100 on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from benchmarks.gpu.rows import keep, read
from benchmarks.old_tokens.cells import Cell, Row, configure, distinct
from benchmarks.old_tokens.guards import GUARDS
from benchmarks.old_tokens.table import print_tables

if TYPE_CHECKING:
    from benchmarks.old_tokens.tasks import Task

RATES = (5e-3, 1e-2, 2e-2, 4e-2)
STALENESS = (0, 1, 2, 4, 8)


def main(given: Sequence[str] | None = None) -> int:
    options = _options(given)
    rows = distinct(read(options.json))
    if options.print:
        print_tables(rows)
        return 0
    import torch

    from benchmarks.old_tokens.tasks import REAL, TINY

    torch.set_num_threads(options.threads)
    table = REAL if options.model else TINY
    if unknown := [name for name in options.tasks if name not in table]:
        raise ConfigError(f"--tasks: {unknown[0]!r} is none of {', '.join(table)}")
    tasks = {name: table[name]() for name in options.tasks or table}
    _refuse_other_scenes(rows, options)
    done = {Cell.of(row) for row in rows}
    runs = _one_by_one if options.model or options.product else _at_once
    number, shares = options.share
    seeds = list(dict.fromkeys(options.seeds))
    mine = [cell for seed in seeds for cell in cells(options, list(tasks), seed=seed)][number::shares]
    for seed in seeds:
        left = [cell for cell in mine if cell.seed == seed and cell not in done]
        for row in runs(left, tasks, options):
            row = {**row, **_scene(options)}
            keep(row, options.json)
            print(f"{row['task']:8s} {row['rate']:8.2e}  staleness {row['staleness']}  {row['guard']:12s}", end="")
            print(f" seed {seed}  {row['held_out']:.3f}", flush=True)
    print_tables(distinct(read(options.json)))
    return 0


def cells(options: argparse.Namespace, tasks: Sequence[str], *, seed: int) -> list[Cell]:
    """Return the cells of a seed: all rates and bounds, then all guards."""
    arms = [(rate, staleness, "tis") for rate in options.rates for staleness in options.staleness]
    arms += [(options.guard_rate, options.guard_staleness, guard) for guard in options.guards]
    return [
        Cell(task=task, rate=rate, staleness=staleness, guard=guard, seed=seed, steps=options.steps)
        for rate, staleness, guard in dict.fromkeys(arms)
        for task in tasks
    ]


def _at_once(left: Sequence[Cell], tasks: Mapping[str, Task], options: argparse.Namespace) -> Iterator[Row]:
    from asyncrl.adapters import registry
    from benchmarks.old_tokens.arms import run_arms

    for name, task in tasks.items():
        of_task = [cell for cell in left if cell.task == name]
        algorithms = {cell.guard: registry.algorithm(configure(cell, {})) for cell in of_task}
        if of_task:
            sizes = {"groups": options.groups, "group_size": options.group_size}
            yield from run_arms(of_task, task, algorithms=algorithms, **sizes)


def _one_by_one(left: Sequence[Cell], tasks: Mapping[str, Task], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.old_tokens.loop import Loop, Scene

    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(
            scratch=Path(folder),
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            backend=options.backend,
            threads=options.threads,
            warm_up=options.warm_up,
            groups=options.groups,
            group_size=options.group_size,
            evaluate_every=options.evaluate_every,
            answers=options.answers,
            problems=options.problems,
            graphs=options.graphs,
        )
        for cell in left:
            yield Loop(cell, tasks[cell.task], scene).run()
            gc.collect()  # the memory of a learner that is closed


def _scene(options: argparse.Namespace) -> Row:
    """Return what all runs of a file share: runs of two models or of two sizes are not to be compared."""
    sizes = {"groups": options.groups, "group_size": options.group_size}
    if not options.model and not options.product:
        return {"model": "tiny", **sizes}
    name = options.model.name if options.model else "tiny, of the product"
    also = ("backend", "dtype", "warm_up", "answers", "problems")
    return {"model": name, **sizes, **{key: getattr(options, key) for key in also}}


def _refuse_other_scenes(rows: Sequence[Row], options: argparse.Namespace) -> None:
    for row, (key, asked) in itertools.product(rows, _scene(options).items()):
        if row.get(key, asked) != asked:
            raise ConfigError(f"--json {options.json}: its runs have {key} {row[key]}, not {asked}: use another file")


def _share(text: str) -> tuple[int, int]:
    """Return I and N of "I/N". Raises ValueError, which argparse reports."""
    number, shares = map(int, text.split("/"))
    if not 0 <= number < shares:
        raise ValueError
    return number, shares


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.old_tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file of rows: read first, then appended to")
    parser.add_argument("--print", action="store_true", help="run nothing, print the tables")
    parser.add_argument("--tasks", nargs="+", default=[], help="(default: all)")
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES), help="learning rates")
    parser.add_argument("--staleness", nargs="*", type=int, default=list(STALENESS), help="age of every token")
    parser.add_argument("--guards", nargs="*", choices=GUARDS, help="(default: all)")
    parser.add_argument("--guard-rate", type=float, default=2e-2, help="learning rate of the guards' runs")
    parser.add_argument("--guard-staleness", type=int, default=4, help="age of every token in the guards' runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*range(4)])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=8, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--product", action="store_true", help="the tiny tasks run by run, with the product's backend")
    parser.add_argument("--model", type=Path, help="folder of a real model (default: a tiny one with random weights)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of learner and sampler")
    parser.add_argument("--backend", default="reference", help="learner's backend (default: reference; megatron)")
    parser.add_argument("--warm-up", type=int, default=0, help="steps in which the learning rate rises (default 0)")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations (default 10)")
    parser.add_argument("--answers", type=int, default=192, help="in an evaluation (default 192)")
    parser.add_argument("--problems", type=int, default=0, help="most held-out problems (default: all)")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="on a GPU, sample without CUDA graphs")
    parser.add_argument(
        "--share", type=_share, default="0/1", metavar="I/N", help="run only every Nth cell, from the Ith on"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(given)
    refused = _refused(options.backend) if options.model or options.product else {}
    if options.guards is None:
        options.guards = [name for name in GUARDS if name not in ("tis", *refused)]
    if asked := set(options.guards) & set(refused):
        raise ConfigError(f"--guards: {min(asked)!r} {refused[min(asked)]}")
    return options


def _refused(backend: str) -> dict[str, str]:
    """Return why a guard cannot run with the product's backend, by its name."""
    tiny_alone = "is for the tiny runs alone, without --model and --product"
    unseen = "changes gradients, which only --backend reference shows"
    found = {name: tiny_alone for name, guard in GUARDS.items() if guard.critic or guard.drops}
    return found | {name: unseen for name, guard in GUARDS.items() if guard.damps and backend != "reference"}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"benchmarks.old_tokens: {error}", file=sys.stderr)
        sys.exit(2)
