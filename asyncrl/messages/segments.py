"""Partial rollouts: tokens of unfinished groups that workers save for the worker that takes the prompt over."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.rollout import FINISH_REASONS, Trajectory, VersionSpan
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray
from asyncrl.messages.validation import array, require


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSegment:
    """Consecutive tokens of one call of ``generate``.

    index              index of the sample whose rollout function made the call
    prompt_digest      hash of the tokens that the call continues
    call               number of this call among the sample's calls that continue the same tokens, from 0
    start              number of tokens of the call before these
    tokens             i32[T]
    behavior_logprobs  f32[T]
    version_spans      as in a trajectory, counted from ``start``
    finish_reason      empty unless these are the last tokens of the call
    experts            experts of these tokens and some before them (messages/routing.py)
    """

    index: int
    call: int
    prompt_digest: bytes
    start: int
    tokens: NDArray[np.int32]
    behavior_logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str = ""
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)

    def __post_init__(self) -> None:
        array(self, "tokens", np.int32)
        array(self, "behavior_logprobs", np.float32)
        for name in ("index", "call", "start"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.finish_reason in ("", *FINISH_REASONS), f"finish_reason {self.finish_reason!r} is unknown")
        Trajectory(  # the checks are the same
            tokens=self.tokens,
            response_mask=np.ones(len(self.tokens), np.bool_),
            behavior_logprobs=self.behavior_logprobs,
            version_spans=self.version_spans,
            experts=self.experts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSegment:
    """What was sampled for an unfinished prompt group since its last segment.

    Topic ``segments``, key GROUP/ATTEMPT/SEGMENT: rollout worker -> the worker that takes the prompt over.

    proof  shows that the writer received the group's prompt (actors/rollout/group_progress.py); empty if prompts have
           no tickets
    """

    group_id: int
    worker: str
    calls: tuple[CallSegment, ...]
    proof: str = ""

    def __post_init__(self) -> None:
        require(len(self.proof) <= 64, "proof is longer than 64 digits")
