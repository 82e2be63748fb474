"""From what a peer's arm wrote to its numbers, over the same kind of window as asyncrl's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Row = dict[str, Any]
Look = tuple[float, int, int]
"""Time, sequences running and waiting."""

WORK: Final = ("recompute_logp", "compute_advantage", "train_step")
"""What AReaL's learner does in a step for itself; the rest of it is waiting for a batch, and the weight update."""


def measure_areal(
    steps: Sequence[Row], trained: Sequence[Row], looks: Sequence[Look], *, warmup: int, bound: int
) -> Row:
    """steps: of steps.jsonl, trained: of trained.jsonl. Raises ValueError when nothing is left behind the warm-up."""
    if len(steps) <= warmup:
        raise ValueError(f"only {len(steps)} steps, of which {warmup} are warm-up")
    begin, end, used = steps[warmup - 1]["time"], steps[-1]["time"], steps[warmup:]
    seconds = end - begin
    # Versions count optimizer steps from 0, as its steps do.
    numbers = {step["step"] for step in used}
    stale = staleness([row["counts"] for row in trained if row["version"] in numbers], bound=bound)
    shares = {name: sum(step.get(f"timeperf/{name}", 0.0) for step in used) / seconds for name in WORK}
    return {
        "tokens_per_second": stale.pop("tokens") / seconds,
        "learner_busy": sum(shares.values()),
        "learner_shares": shares,
        "update_seconds": sum(step.get("timeperf/update_weights", 0.0) for step in used) / len(used),
        **stale,
        "steps": len(used),
        "step_seconds": seconds / len(used),
        "step_times": [step["time"] - begin for step in used],
        "window_seconds": seconds,
        **engine(looks, begin=begin, end=end),
    }


def staleness(counts: Sequence[Sequence[int]], *, bound: int) -> Row:
    """Of tokens: counts[i] of a step are i versions old."""
    total: dict[int, int] = {}
    for of_step in counts:
        for versions, tokens in enumerate(of_step):
            total[versions] = total.get(versions, 0) + tokens
    tokens = sum(total.values())
    return {
        "tokens": tokens,
        "staleness_mean": sum(versions * number for versions, number in total.items()) / max(tokens, 1),
        "staleness_max": max((versions for versions, number in total.items() if number), default=0),
        "tokens_over_bound_share": sum(n for versions, n in total.items() if versions > bound) / max(tokens, 1),
        "staleness_counts": {str(versions): number for versions, number in sorted(total.items()) if number},
    }


def engine(looks: Sequence[Look], *, begin: float, end: float) -> Row:
    """By time, not by look: an engine that is busy with an update answers late."""
    within = [look for look in looks if begin <= look[0] <= end]
    spans = [(after[0] - look[0], look) for look, after in zip(within, within[1:], strict=False)]
    seconds = sum(span for span, _ in spans) or 1.0
    return {
        "engine_at_zero": sum(span for span, look in spans if look[1] == 0) / seconds,
        "engine_running": sum(span * look[1] for span, look in spans) / seconds,
        "engine_waiting": sum(span * look[2] for span, look in spans) / seconds,
        "engine_standstills": standstills(within),
        "engine_looks": len(within),
    }


def standstills(looks: Sequence[Look]) -> list[float]:
    """Seconds of each time that nothing ran."""
    found: list[float] = []
    since: float | None = None
    for time, running, _ in looks:
        if running == 0 and since is None:
            since = time
        elif running and since is not None:
            found.append(round(time - since, 3))
            since = None
    return found


def ours(row: Mapping[str, Any], samples: Sequence[Row], steps: Sequence[Row], *, bound: int) -> Row:
    """What a row of benchmarks.gpu.modes lacks to stand beside a peer's, from the arm's own timeline."""
    used = steps[row["warmup_steps"] :]
    begin, end = steps[row["warmup_steps"] - 1]["time"], steps[-1]["time"]
    looks: list[Look] = [
        (sample["time"], sum(of["running"] for of in seen), sum(of["waiting"] for of in seen))
        for sample in samples
        if (seen := [of for of in sample["engines"] if of is not None])
    ]
    stale = staleness([step["staleness/histogram"]["counts"] for step in used], bound=bound)
    del stale["tokens"]
    exact = {"staleness_mean": row["staleness_mean"], "staleness_max": row["staleness_max"]}
    work = sum(step["learner/step_seconds"] for step in used)
    return {
        "learner_busy": work / (end - begin),
        "step_times": [step["time"] - begin for step in used],
        **stale,
        **exact,
        **engine(looks, begin=begin, end=end),
    }
