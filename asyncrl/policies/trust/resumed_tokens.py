"""Tokens that a worker took over from an earlier attempt at its group: they are not held against it. Pure.

A worker that takes a group over goes on from what others saved (topic ``segments``), and sends it with its own tokens.
Who saved it may have invented it. So a trajectory says how many of its sampled tokens were taken over, always its first
ones, and a worker is judged by the others alone (logprob_mismatch.py). What was taken over is scored whenever it is
about to be trained: where it is none of the policy's, its group is not trained, and nobody is quarantined for it.

Tests: tests/unit/policies/trust/test_resumed_tokens.py, tests/actors/learner/test_validator.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.policies.batching.packing import Document


def split(
    documents: Sequence[Document], groups: Sequence[TrajectoryGroup]
) -> tuple[list[Document], dict[int, Document]]:
    """(each document with the tokens that its worker sampled itself; index -> document with those it took over).

    The tokens are in the masks. ``documents`` are those of the groups' trajectories, in order.
    """
    own, taken_over = list(documents), dict[int, Document]()
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    for index, (document, (group, trajectory)) in enumerate(zip(documents, trajectories, strict=True)):
        if trajectory.resumed:
            before = np.arange(len(document)) < len(group.prompt_of(trajectory)) + _end(trajectory)
            own[index] = dataclasses.replace(
                document,
                response_mask=document.response_mask & ~before,
                staleness=np.where(before, np.int32(0), document.staleness),
            )
            if document.response_mask.any():  # what is left out as too old steers what is trained behind it
                prompt = np.zeros(len(document) - len(trajectory.tokens), np.bool_)
                sampled = np.concatenate([prompt, trajectory.response_mask])
                taken_over[index] = dataclasses.replace(document, response_mask=sampled & before)
    return own, taken_over


def spoiled(
    taken_over: Mapping[int, Document], logprobs: Mapping[int, NDArray[np.float32]], *, bound: float
) -> dict[int, str]:
    """Index -> why, of those that are none of the policy's: further off than ``bound`` nats per token and version.

    logprobs  the trainer's, f32[T] by document
    """
    found: dict[int, str] = {}
    for index, document in taken_over.items():
        mask = document.response_mask
        off = float(np.abs(logprobs[index].astype(np.float64) - document.behavior_logprobs)[mask].mean())
        allowed = bound * (1 + max(0, int(document.staleness[mask].max())))
        if not off <= allowed:  # NaN is no agreement
            found[index] = (
                f"{np.count_nonzero(mask)} tokens that an earlier attempt saved are {off:.3g} nats per token off the "
                f"trainer's ({allowed:.3g} are allowed)"
            )
    return found


def _end(trajectory: Trajectory) -> int:
    """Behind the last token that was taken over."""
    return int(np.flatnonzero(trajectory.response_mask)[trajectory.resumed - 1]) + 1
