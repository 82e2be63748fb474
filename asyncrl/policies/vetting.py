"""Trajectory groups that cannot be: found out before they are held, so that no such number reaches a gradient.

What a message can tell of itself (lengths, positive or non-finite logprobs) it checks when it is built (messages.py).
What only the learner can know is here: the model's vocabulary and context, and the versions there have been.
Tests: tests/test_vetting.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.policies.staleness import Forks, effective_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetting:
    """Of the model that is trained: tokens are 0..vocabulary_size - 1, and context_tokens fit, the prompt included."""

    vocabulary_size: int = 2**31
    context_tokens: int = 2**31
    are_sampled: bool = True
    """False where answers come from the data: no version sampled them."""

    def problem(self, group: TrajectoryGroup, *, run_epoch: int, policy_version: int, forks: Forks) -> str:
        """Why a learner at (run_epoch, policy_version) must not train the group; "" when nothing speaks against it.

        A buried group carries nothing to look at.
        """
        if group.error:
            return ""
        if not len(group.prompt_tokens):
            return "it has no prompt tokens"
        if problem := self._of_tokens(group.prompt_tokens, "prompt token"):
            return problem
        for trajectory in group.trajectories:
            length = len(group.prompt_tokens) + len(trajectory.tokens)
            if length > self.context_tokens:
                return f"prompt and answer have {length} tokens, the model's context {self.context_tokens}"
            problem = self._of_tokens(trajectory.tokens, "token") or _of_reward(trajectory)
            if self.are_sampled and not problem:
                problem = _of_versions(trajectory, run_epoch=run_epoch, policy_version=policy_version, forks=forks)
            if problem:
                return problem
        return ""

    def _of_tokens(self, tokens: NDArray[np.int32], what: str) -> str:
        low, high = int(tokens.min()), int(tokens.max())
        if low >= 0 and high < self.vocabulary_size:
            return ""
        return f"{what} {low if low < 0 else high} is outside the vocabulary of {self.vocabulary_size}"


def _of_reward(trajectory: Trajectory) -> str:
    parts = {"reward": trajectory.reward, **trajectory.reward_parts}
    return next((f"{name} is {value}" for name, value in parts.items() if not math.isfinite(value)), "")


def _of_versions(trajectory: Trajectory, *, run_epoch: int, policy_version: int, forks: Forks) -> str:
    for span in trajectory.version_spans:
        if span.run_epoch > run_epoch or effective_version(span, forks) > policy_version:
            return (
                f"sampled by version {span.policy_version} of run epoch {span.run_epoch}, "
                f"and the learner is at version {policy_version} of {run_epoch}"
            )
    return ""
