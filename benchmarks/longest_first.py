"""Begin prompts in the order of their longest answers, as if lengths were known: what is trained of the ideal.

    python -m benchmarks.longest_first --json docs/results/longest_first.jsonl       a minute on one core

The simulated clock of `asyncrl plan`, in the long tail of benchmarks.peers. Within every --blocks groups, the one whose
longest answer is the longest begins first; a block of 1 is the order of the data, one of 16 a batch. Longer blocks also
put answers of like lengths into one batch. Knowing the lengths is the best case: expected ones come from a history.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.planning.simulation import GroupLengths, Ideal, Plan, Timing
from benchmarks.gpu.rows import command, keep
from benchmarks.peers.scene import SCENES, Scene
from benchmarks.simulated import Lengths, group_lengths

ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "waits, 4": {"mode": "async", "max_staleness": 4, "eviction": "wait"},
    "tokens, 4": {"mode": "async", "max_staleness": 4, "discard": "tokens"},
    "waits, 8": {"mode": "async", "max_staleness": 8, "eviction": "wait"},
    "sync": {"mode": "sync", "max_staleness": 0},
}


def longest_first(lengths: GroupLengths, *, block: int) -> GroupLengths:
    @functools.cache
    def order(start: int) -> list[int]:
        return sorted(range(start, start + block), key=lambda group_id: -max(lengths(group_id)))

    return lambda group_id: lengths(order(group_id - group_id % block)[group_id % block])


def of_ideal(scene: Scene, arm: str, *, block: int, seed: int, steps: int) -> float:
    """Return the trained tokens per second, as a share of an engine and a learner that never wait."""
    lengths = Lengths(scene.length_kind, mean=scene.length_mean, maximum=scene.length_max)  # type: ignore[arg-type]
    warmup = 20
    plan = Plan(
        workers=1,
        learner_machines=1,
        groups_per_batch=scene.groups_per_batch,
        group_size=scene.group_size,
        steps=warmup + steps,
        warmup=warmup,
        seed=seed,
        **ARMS[arm],
    )
    timing = Timing(
        seconds_per_token=scene.seconds_per_token,
        seconds_per_sequence=scene.seconds_per_sequence,
        capacity=scene.capacity,
        load_seconds=scene.load_seconds,
        train_tokens_per_second=scene.train_tokens_per_second,
        train_seconds=scene.train_seconds,
    )
    drawn = group_lengths(lengths, group_size=scene.group_size, seed=seed)
    reached = Ideal(plan, timing, longest_first(drawn, block=block)).run()
    return reached.tokens_per_second / scene.ideal_tokens_per_second(lengths.mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 16, 48, 160], help="groups that are put in order")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="counted steps (default: 80)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there")
    options = parser.parse_args()
    print("arm        block   of ideal, by seed")
    for arm in ARMS:
        for block in options.blocks:
            reached = [
                round(of_ideal(SCENES["long tail"], arm, block=block, seed=seed, steps=options.steps), 3)
                for seed in options.seeds
            ]
            row = {"arm": arm, "block": block, "of_ideal": reached, "seeds": options.seeds, "steps": options.steps}
            keep(row | {"command": command("benchmarks.longest_first")}, options.json)
            print(f"{arm:10s} {block:5d}   {', '.join(f'{one:.3f}' for one in reached)}", flush=True)


if __name__ == "__main__":
    main()
