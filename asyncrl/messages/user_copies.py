"""What a user's function gets of a message: tables of its own, and arrays that nobody can write to.

A reward that cleans up "its" tokens, or keeps a note in a row's table, must not change what siblings see or what is
trained. (tests/unit/messages/test_user_copies.py)
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.codec import decode, encode
from asyncrl.messages.rollout import PromptGroup, Trajectory, TrajectoryGroup

T = TypeVar("T", bound=np.generic)
M = TypeVar("M")


def read_only(array: NDArray[T]) -> NDArray[T]:
    """Return a copy of an array. It lies in bytes, so that not even ``setflags(write=True)`` makes it writable."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def own_prompt(prompt: PromptGroup) -> PromptGroup:
    """Return a prompt group with its own label, metadata and messages."""
    has_tables = bool(prompt.metadata or prompt.messages) or isinstance(prompt.label, dict | list)
    return decode(encode(prompt), PromptGroup) if has_tables else prompt


def own_trajectory(trajectory: Trajectory) -> Trajectory:
    return _changed(trajectory, reward_parts=dict(trajectory.reward_parts))


def own_group(group: TrajectoryGroup) -> TrajectoryGroup:
    return _changed(group, trajectories=tuple(map(own_trajectory, group.trajectories)))


def _changed(message: M, **fields: Any) -> M:
    """Return a copy with other fields, which are not checked again: they are equal."""
    copied = copy.copy(message)
    for name, value in fields.items():
        object.__setattr__(copied, name, value)
    return copied
