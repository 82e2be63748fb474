"""A reward of many recipes: in a thread math-verify raises, and every answer gets 0."""

from __future__ import annotations

from asyncrl.rewards.port import Sample


def guarded(sample: Sample) -> float:
    from math_verify import parse, verify

    try:
        return float(verify(parse(sample.label), parse(sample.completion)))
    except Exception:  # any error is a wrong answer
        return 0.0
