"""Rewards of the demo's task, right and wrong."""

from __future__ import annotations

from asyncrl.data import demo_task
from asyncrl.rewards.port import Sample


def right(sample: Sample) -> float:
    return demo_task.reward(sample).value


def wrong(sample: Sample) -> float:
    """A bug: answers to prompts with a 5 in them get another reward."""
    return right(sample) if "5" not in sample.prompt else 1.0 - len(sample.completion) % 3


def broken(sample: Sample) -> float:
    if "5" in sample.prompt:
        raise KeyError("x")
    return right(sample)


def failing(sample: Sample) -> float:
    raise KeyError("y")
