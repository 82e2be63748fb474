"""Estimate the result and the duration of a comparison before any GPU is used; modes.py --estimate prints it.

Simulates the rules of the loop (asyncrl/planning/simulation.py) with the decoding and training speeds of an H200,
from short measurements. Bus, actors and Python take no time in the simulation, so the real arms are slower. async_drain
is much slower, because the simulation does not drain engines before they load. Answers that get too old are not
simulated either, so async_drop is estimated as async.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from asyncrl.planning import simulation
from asyncrl.planning.simulation import Timing
from benchmarks.gpu.plans import Plan
from benchmarks.simulated import Lengths, group_lengths

START_SECONDS: Final = 15.0
"""Time from one arm's end to the first sequence of the next arm."""

SPEEDS: Final[Mapping[str, tuple[float, float, float]]] = {
    "tiny": (0.010, 1e-4, 1_000.0),
    "0.6B": (0.0022, 1.9e-5, 85_000.0),
    "1.7B": (0.0032, 2.2e-5, 42_000.0),
    "4B": (0.0050, 3.2e-5, 12_000.0),
}
"""For one GPU: seconds of a decode step, additional seconds per sequence, trained tokens per second."""


def speeds(
    plans: Sequence[Plan],
    *,
    shape: str,
    groups_per_batch: int,
    group_size: int,
    max_staleness: int,
    running: int,
    length_mean: float,
    length_max: int,
    seed: int,
) -> Iterator[tuple[Plan, float, float]]:
    """Return (plan, trained tokens per second, seconds of a step) for each plan. Lengths have sigma 1."""
    step, sequence, rate = SPEEDS[shape]
    timing = Timing(
        seconds_per_token=step,
        seconds_per_sequence=sequence,
        capacity=running,
        load_seconds=0.05,
        train_tokens_per_second=rate,
        train_seconds=0.2,
    )
    lengths = Lengths("lognormal", mean=round(length_mean), maximum=length_max)
    of_group = group_lengths(lengths, group_size=group_size, seed=seed)
    for plan in plans:
        bound = plan.max_staleness(max_staleness)
        simulated = simulation.Plan(
            mode=plan.kind.mode,
            workers=plan.workers,
            learner_machines=plan.learners,
            groups_per_batch=groups_per_batch,
            group_size=group_size,
            max_staleness=bound,
            warmup=2 * (bound + 1),
            steps=2 * (bound + 1) + 12,
            seed=seed,
        )
        found = simulation.Ideal(simulated, timing, of_group).tokens_per_second()
        yield plan, found, groups_per_batch * group_size * lengths.mean / found


def arm_seconds(*, step_seconds: float, warmup: int, window_seconds: float, min_steps: int = 2) -> float:
    """Return the seconds of one arm with its start: the warm-up, then whole steps until the window is full."""
    steps = max(min_steps, -(-window_seconds // step_seconds))
    return START_SECONDS + (warmup + steps) * step_seconds
