"""What a user's function gets of a message: tables and arrays of its own; the arrays are read-only.

A reward that cleans up "its" tokens, or keeps a note in a row's table, must not change what siblings see or what is
trained. (tests/unit/messages/test_user_copies.py)
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.codec import decode, encode
from asyncrl.messages.likeliest import Likeliest
from asyncrl.messages.rollout import PromptGroup, Trajectory, TrajectoryGroup
from asyncrl.messages.support import Support

T = TypeVar("T", bound=np.generic)
M = TypeVar("M")


def read_only(array: NDArray[T]) -> NDArray[T]:
    """Return a copy of an array. It lies in bytes, so that not even ``setflags(write=True)`` makes it writable.

    torch.from_numpy() and as_tensor() write to it nevertheless, so whoever may do that gets a copy that nobody else
    reads.
    """
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def own_prompt(prompt: PromptGroup) -> PromptGroup:
    """Return a prompt group with its own label, metadata and messages."""
    has_tables = bool(prompt.metadata or prompt.messages) or isinstance(prompt.label, dict | list)
    own = decode(encode(prompt), PromptGroup) if has_tables else prompt
    return _changed(own, prompt_tokens=read_only(prompt.prompt_tokens))


def own_trajectory(trajectory: Trajectory) -> Trajectory:
    arrays = ("prompt_tokens", "tokens", "response_mask", "behavior_logprobs", "teacher_logprobs", "experts")
    copies = {name: read_only(getattr(trajectory, name)) for name in arrays}
    return _changed(
        trajectory,
        reward_parts=dict(trajectory.reward_parts),
        metadata=copy.deepcopy(trajectory.metadata),
        support=own_support(trajectory.support),
        likeliest=own_likeliest(trajectory.likeliest),
        teacher_likeliest=own_likeliest(trajectory.teacher_likeliest),
        **copies,
    )


def own_support(support: Support) -> Support:
    return _changed(support, counts=read_only(support.counts), tokens=read_only(support.tokens))


def own_likeliest(likeliest: Likeliest) -> Likeliest:
    return _changed(likeliest, tokens=read_only(likeliest.tokens), logprobs=read_only(likeliest.logprobs))


def own_group(group: TrajectoryGroup) -> TrajectoryGroup:
    own = tuple(map(own_trajectory, group.trajectories))
    return _changed(group, prompt_tokens=read_only(group.prompt_tokens), trajectories=own)


def _changed(message: M, **fields: Any) -> M:
    """Return a copy with other fields, which are not checked again: they are equal."""
    copied = copy.copy(message)
    for name, value in fields.items():
        object.__setattr__(copied, name, value)
    return copied
