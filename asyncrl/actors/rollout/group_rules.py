"""The rules of a group: when it is complete, and what a rollout function may return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncrl.config import RunConfig
from asyncrl.errors import MessageError, RolloutError
from asyncrl.messages import PromptGroup, Trajectory, replace
from asyncrl.messages.codec import decode, encode, has_more_values
from asyncrl.messages.images import ImageRef, check_images
from asyncrl.messages.user_copies import own_likeliest, own_support, read_only
from asyncrl.policies.groups.validation import reward_problems

_LARGEST_METADATA: Final = 2**16
_MOST_VALUES: Final = 2**10
_MOST_IN_GROUP: Final = 2**17
"""In the metadata of a trajectory, and of a whole group, which each trajectory has an equal share of. The learner
accepts only so many values in a message (messages/codec.py) and would blame the worker."""
_NO_PROMPT: Final = np.zeros(0, np.int32)

Rollout = tuple[Trajectory, ...]
"""The parts of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """How a group is made of its samples.

    sample_seconds  time limit of a rollout function per sample, without its generations; 0: no limit
    min_group       fewest successful samples with which a group is published despite failed ones, and ones without a
                    reward; 0: one such sample fails the group
    extra_samples   samples begun in addition to the requested ones; the first that finish form the group
    group_seconds   deadline after which the group is complete with min_group samples; 0: no deadline
    max_parts       maximum trajectories of a rollout; 0: any number
    largest_reward  maximum magnitude of a reward, of its parts, and of turn rewards (reward.largest)
    needs_reward    whether the run's reward is, or includes, the rollout function's reward
    temperature     rollout.temperature; a group names only another one

    A result beyond max_parts, largest_reward or needs_reward fails its sample. Samples that are cut off are the
    longest, which biases lengths. The group therefore carries their number.
    """

    sample_seconds: float = 0.0
    min_group: int = 0
    extra_samples: int = 0
    group_seconds: float = 0.0
    max_parts: int = 0
    largest_reward: float = math.inf
    needs_reward: bool = False
    temperature: float = 1.0

    @classmethod
    def from_run(cls, run: RunConfig) -> GroupRules:
        """Return the rules of training groups."""
        return cls(
            sample_seconds=run.rollout.timeout_seconds,
            min_group=run.rollout.min_group,
            extra_samples=run.rollout.extra_samples,
            group_seconds=run.rollout.group_seconds,
            max_parts=run.rollout.max_parts,
            largest_reward=run.reward.largest,
            needs_reward=run.reward.takes_given,
            temperature=run.rollout.temperature,
        )

    @property
    def cuts(self) -> bool:
        """Whether unfinished samples may be cut off."""
        return self.extra_samples > 0 or self.group_seconds > 0


def check_rollout(
    made: Any,
    prompt: PromptGroup,
    *,
    index: int,
    num_resumed: int,
    context_tokens: int,
    rules: GroupRules = GroupRules(),
) -> Rollout:
    """Return the parts of rollout ``index``.  Raises RolloutError, TypeError or ValueError if it cannot be trained.

    num_resumed: number of its first sampled tokens that earlier attempts sampled. With several parts, contexts may grow
    in parallel, so it is unknown which parts contain these tokens. All sampled tokens of all parts then count as
    resumed (policies/groups/resumed_tokens).
    """
    trajectories = made if isinstance(made, list | tuple) else (made,)
    if not trajectories:
        raise ValueError("it gave no trajectory")
    if 0 < rules.max_parts < len(trajectories):
        raise ValueError(f"it gave {len(trajectories)} trajectories, and rollout.max_parts = {rules.max_parts}")
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
    _check_reward(given, needed=rules.needs_reward and not prompt.reward, largest=rules.largest_reward)
    for one in trajectories:
        turns = {f"the reward of turn {turn.start}": turn.reward for turn in one.turn_rewards}
        _refuse(reward_problems(turns, {}, largest=rules.largest_reward))
    parts = []
    for number, one in enumerate(trajectories):
        sampled = int(one.response_mask.sum())
        parts.append(
            replace(
                one,
                # A rollout function may keep and reuse its arrays, and a reward must not write to them.
                tokens=read_only(one.tokens),
                response_mask=read_only(one.response_mask),
                behavior_logprobs=read_only(one.behavior_logprobs),
                experts=read_only(one.experts),
                support=own_support(one.support),
                likeliest=own_likeliest(one.likeliest),
                rollout=index,
                part=number,
                prompt_tokens=_NO_PROMPT
                if np.array_equal(one.prompt_tokens, prompt.prompt_tokens)
                else read_only(one.prompt_tokens),
                images=_images_of(one, prompt),
                resumed=min(num_resumed, sampled) if is_alone or not num_resumed else sampled,
                reward=given.reward,
                reward_parts=dict(given.reward_parts),
                metadata=_own_metadata(one, most=_MOST_IN_GROUP // (prompt.group_size * len(trajectories))),
            )
        )
    return tuple(parts)


def _own_metadata(one: Trajectory, *, most: int) -> dict[str, Any]:
    """Return a copy as the learner will get it. Raises ValueError for what cannot be sent.

    most  values that its share of a group's message has room for
    """
    if not one.metadata:
        return {}
    try:
        data = encode(one.metadata)
        own = decode(data, dict[str, Any])
    except MessageError as error:
        raise ValueError(f"the metadata of its trajectory: {error}") from error
    if len(data) > _LARGEST_METADATA:
        raise ValueError(
            f"the metadata of its trajectory has {len(data):,} bytes, and {_LARGEST_METADATA:,} are allowed"
        )
    if has_more_values(data, most := min(most, _MOST_VALUES)):
        raise ValueError(f"the metadata of its trajectory has more than {most:,} values; join them in a text")
    return own


def _images_of(one: Trajectory, prompt: PromptGroup) -> tuple[ImageRef, ...]:
    """Return the images of a trajectory: a function that knows of none leaves those of the group's prompt to us."""
    continues = not len(one.prompt_tokens) or np.array_equal(one.prompt_tokens, prompt.prompt_tokens)
    names_them = any(image.start < len(prompt.prompt_tokens) for image in one.images)
    images = (*prompt.images, *one.images) if continues and not names_them else one.images
    before = len(prompt.prompt_tokens) if continues else len(one.prompt_tokens)
    check_images(images, num_tokens=before + len(one.tokens))
    return images


def _check_reward(given: Trajectory, *, needed: bool, largest: float) -> None:
    """Check the reward that a rollout function set or left out.  needed: whether it counts. Raises RolloutError."""
    is_set = not math.isnan(given.reward)
    if needed and not is_set and given.reward_parts.get("timeout"):  # the harness hit its limit (harnesses/load.py)
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
