"""A custom reward, filter and rollout function."""

from __future__ import annotations

from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import PromptGroup, Trajectory, TrajectoryGroup
from asyncrl.rewards.port import Sample


def reward(sample: Sample) -> dict[str, float]:
    """Its parts are metrics: reward/digits and reward/short."""
    digits = sum(letter.isdigit() for letter in sample.completion) / max(1, len(sample.completion))
    return {"digits": digits, "short": 0.1 * (len(sample.completion) < 4)}


def keep(group: TrajectoryGroup) -> bool:
    """algorithm.filters: groups with an answer at least."""
    return any(len(trajectory.tokens) for trajectory in group.trajectories)


async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    """One answer, like rollout.function = "single_turn"."""
    builder = TrajectoryBuilder(prompt.prompt_tokens)
    builder.add_answer(await generate(builder.tokens))
    return builder.trajectory()
