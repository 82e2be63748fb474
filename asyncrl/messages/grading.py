"""Requests of rollout workers to reward workers, and the answers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.codec import encode
from asyncrl.messages.pieces import InPieces
from asyncrl.messages.rollout import Trajectory
from asyncrl.messages.validation import array, replace, require


@dataclass(frozen=True, slots=True, kw_only=True)
class UngradedRollout:
    """One rollout to be rewarded.  completion: text of its last part;  parts: its trajectories, without experts"""

    completion: str
    parts: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        require(bool(self.parts), "a rollout has no trajectory")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingRequest:
    """The rollouts of one prompt, to be rewarded.  Topic ``grading``: rollout workers -> reward workers.

    prompt, prompt_tokens, label, metadata, dataset, reward  as in PromptGroup
    worker     worker that asks
    in_pieces  for a request larger than a message: where everything but ``worker`` is (topic ``grading_pieces``)
    """

    rollouts: tuple[UngradedRollout, ...] = ()
    prompt: str = ""
    prompt_tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    reward: str = ""
    worker: str = ""
    in_pieces: InPieces | None = None

    def __post_init__(self) -> None:
        array(self, "prompt_tokens", np.int32)
        require(bool(self.rollouts) != (self.in_pieces is not None), "there is nothing to grade, or it is there twice")

    def key(self) -> str:
        """Key of the request and of its answer: a digest of the content. It is the same for every asker and attempt."""
        return hashlib.sha256(encode(replace(self, worker=""))).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """The rewards of the rollouts of one request.  Topic ``grades``: reward workers -> the rollout worker that asked.

    rewards  one finite reward per rollout
    parts    parts of each reward
    error    why there are no rewards
    worker   worker that graded
    """

    rewards: tuple[float, ...] = ()
    parts: tuple[dict[str, float], ...] = ()
    error: str = ""
    worker: str = ""

    def __post_init__(self) -> None:
        require(bool(self.rewards) != bool(self.error), "grades are either rewards or an error")
        require(len(self.parts) == len(self.rewards), f"parts of {len(self.parts)} of {len(self.rewards)} rewards")
        numbers = (*self.rewards, *(number for parts in self.parts for number in parts.values()))
        require(all(map(math.isfinite, numbers)), "a reward is not finite")
