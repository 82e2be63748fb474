"""Turns the result of a rollout function into the parts of one rollout: checked, numbered, with one reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncrl.errors import RolloutError
from asyncrl.messages import PromptGroup, Trajectory, replace
from asyncrl.policies.groups.validation import reward_problems
from asyncrl.rewards.port import Reward

_NO_PROMPT: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits on the result of a rollout function. A result beyond them fails its sample, but not its group.

    max_parts     maximum trajectories of a rollout; 0: any number
    largest       maximum magnitude of a reward, of its parts, and of turn rewards (reward.largest)
    needs_reward  whether the run's reward is, or includes, the rollout function's reward
    """

    max_parts: int = 0
    largest: float = math.inf
    needs_reward: bool = False


ANY: Final = RolloutLimits()


def check_rollout(
    made: Any, prompt: PromptGroup, *, index: int, num_resumed: int, context_tokens: int, limits: RolloutLimits = ANY
) -> tuple[Trajectory, ...]:
    """Return the parts of rollout ``index``.  Raises RolloutError, TypeError or ValueError if it cannot be trained.

    num_resumed: number of its first sampled tokens that earlier attempts sampled. With several parts, contexts may grow
    in parallel, so it is unknown which parts contain these tokens. All sampled tokens of all parts then count as
    resumed (policies/groups/resumed_tokens).
    """
    trajectories = made if isinstance(made, list | tuple) else (made,)
    if not trajectories:
        raise ValueError("it gave no trajectory")
    if 0 < limits.max_parts < len(trajectories):
        raise ValueError(f"it gave {len(trajectories)} trajectories, and rollout.max_parts = {limits.max_parts}")
    for one in trajectories:
        if not isinstance(one, Trajectory):
            raise TypeError(f"it gave a {type(one).__name__}, not a Trajectory")
        of_part = prompt.prompt_tokens if not len(one.prompt_tokens) else one.prompt_tokens
        length = len(of_part) + len(one.tokens)
        if length > context_tokens:  # the learner would blame this worker
            raise ValueError(f"prompt and answer have {length} tokens, the model's context {context_tokens}")
        if not one.response_mask.any():
            raise ValueError("its trajectory has no token that the model sampled: there is nothing to train")
    is_alone = len(trajectories) == 1
    given = _given_reward(trajectories)
    _check_reward(given, needed=limits.needs_reward and not prompt.reward, largest=limits.largest)
    for one in trajectories:
        turns = {f"the reward of turn {turn.start}": turn.reward for turn in one.turn_rewards}
        _refuse(reward_problems(turns, {}, largest=limits.largest))
    parts = []
    for number, one in enumerate(trajectories):
        sampled = int(one.response_mask.sum())
        parts.append(
            replace(
                one,
                rollout=index,
                part=number,
                prompt_tokens=_NO_PROMPT
                if np.array_equal(one.prompt_tokens, prompt.prompt_tokens)
                else one.prompt_tokens,
                resumed=min(num_resumed, sampled) if is_alone or not num_resumed else sampled,
                reward=given.reward,
                reward_parts=given.reward_parts,
            )
        )
    return tuple(parts)


def first_rollouts(rollouts: Sequence[tuple[Trajectory, ...]], count: int) -> Sequence[tuple[Trajectory, ...]]:
    """Return the first ``count`` rollouts: with extra samples, more may end at the same moment. A chosen extra sample
    takes the number of a missing one."""
    if all(parts[0].rollout < count for parts in rollouts):
        return rollouts
    chosen = enumerate(rollouts[:count])
    return [tuple(replace(part, rollout=number) for part in parts) for number, parts in chosen]


def with_reward(parts: Sequence[Trajectory], reward: Reward) -> list[Trajectory]:
    """Return the parts of a rollout with its reward set."""
    return [replace(one, reward=float(reward.value), reward_parts=dict(reward.parts)) for one in parts]


def _check_reward(given: Trajectory, *, needed: bool, largest: float) -> None:
    """Check the reward that a rollout function set or left out.  needed: whether it counts. Raises RolloutError."""
    is_set = not math.isnan(given.reward)
    if needed and not is_set and given.reward_parts.get("timeout"):  # the harness hit its limit (harnesses/limits.py)
        raise RolloutError(
            "the sample took longer than rollout.options.timeout_seconds, and nothing says its reward; set "
            'rollout.options.timeout_reward, or on_timeout = "fail"'
        )
    if needed and not is_set:
        raise RolloutError(
            "the rollout function set no reward; give one to trajectory(reward=...), or let the harness give one, 0 if "
            "the algorithm looks at none, or choose another reward.kind"
        )
    rewards = {"the reward": given.reward} if needed else {}
    _refuse(reward_problems(rewards, given.reward_parts, largest=largest))


def _refuse(problems: Iterator[str]) -> None:
    if (problem := next(problems, "")) != "":
        raise RolloutError(f"the result of the rollout function cannot be trained: {problem}")


def _given_reward(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the last trajectory with a reward, which is the rollout's. Raises ValueError if rewards differ."""
    given = [one for one in trajectories if not math.isnan(one.reward)]
    if any((one.reward, one.reward_parts) != (given[-1].reward, given[-1].reward_parts) for one in given):
        raise ValueError(f"its trajectories have the rewards {[one.reward for one in given]}, but a rollout has one")
    return given[-1] if given else trajectories[-1]
