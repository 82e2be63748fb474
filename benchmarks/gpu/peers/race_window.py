"""From what an arm of the race wrote to its windows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.peers.window import Look, Row, engine, staleness

Step = dict[str, Any]
"""time at its end, tokens, counts (counts[i] tokens are i versions old); dropped tokens, train_seconds if known"""


def of_slime(begun: Sequence[Mapping[str, Any]], collected: Sequence[Mapping[str, Any]]) -> list[Step]:
    """Return the steps that are over: one ends where the next begins.

    begun, collected  lines of slime_parts.STEPS and slime_parts.ROLLOUTS

    Before step k the trainer has sent its weights k + 1 times; the first ones are version 1.
    """
    parts = {row["step"]: row["parts"] for row in collected}
    steps = []
    for row, after in zip(begun, begun[1:], strict=False):
        ages = {row["step"] + 1 - int(version): tokens for version, tokens in parts[row["step"]].items()}
        counts = [ages.get(age, 0) for age in range(max(ages) + 1)]
        steps.append({"time": after["time"], "tokens": sum(counts), "counts": counts})
    return steps


def windows(steps: Sequence[Step], *, warmup: int, seconds: float, number: int) -> tuple[bool, list[tuple[int, int]]]:
    """Return whether all windows are full, and those that are: (first, last) of ``steps``, from the first's end."""
    found: list[tuple[int, int]] = []
    first = warmup - 1
    while len(found) < number:
        ends = (i for i in range(first + 1, len(steps)) if steps[i]["time"] - steps[first]["time"] >= seconds)
        last = next(ends, None)
        if last is None:
            return False, found
        found.append((first, last))
        first = last
    return True, found


def measure(steps: Sequence[Step], looks: Sequence[Look], *, bound: int) -> Row:
    """Measure from the end of the first step to the end of the last."""
    begin, end, used = steps[0]["time"], steps[-1]["time"], steps[1:]
    seconds = end - begin
    stale = staleness([step["counts"] for step in used], bound=bound)
    del stale["tokens"]
    tokens = sum(step["tokens"] for step in used)
    dropped = sum(step.get("dropped", 0) for step in used)
    trained = [step["train_seconds"] for step in used if "train_seconds" in step]
    return {
        "tokens_per_second": tokens / seconds,
        "dropped_tokens_share": dropped / max(tokens + dropped, 1),
        **({"train_seconds": sum(trained) / len(trained)} if trained else {}),
        **stale,
        "steps": len(used),
        "step_seconds": seconds / len(used),
        "window_seconds": seconds,
        "began": begin,
        "ended": end,
        **engine(looks, begin=begin, end=end),
    }
