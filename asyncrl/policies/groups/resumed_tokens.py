"""Tokens that nobody who works now is accountable for: taken over from an earlier attempt, or inherited. Pure.

A worker that takes over a group continues from the tokens that others saved (topic ``segments``), and sends them along
with its own. The saved tokens may be invented. So a trajectory states how many of its sampled tokens were taken over
(always the first ones), and the worker is judged only by the rest (logprob_mismatch.py). Tokens that were taken over
are checked whenever they are about to be trained. If they are not the policy's, their group is not trained, and no
worker is quarantined.

All tokens of a group that an earlier incarnation of the learner left in the log count as taken over: its worker may
have been mended since.

Tests: tests/unit/policies/groups/test_resumed_tokens.py, tests/actors/learner/test_validator.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import Trajectory, TrajectoryGroup
from asyncrl.policies.batching.packing import TrainingSequence


def split(
    sequences: Sequence[TrainingSequence],
    groups: Sequence[TrajectoryGroup],
    *,
    inherited: Collection[int] = (),
) -> tuple[list[TrainingSequence], dict[int, TrainingSequence]]:
    """Split sequences by who sampled their tokens.

    Return (each sequence masked to the tokens that its worker sampled, index -> sequence masked to the tokens that the
    worker took over). ``sequences`` are those of the groups' trajectories, in order.

    inherited  ids of groups of an earlier incarnation
    """
    own, taken_over = list(sequences), dict[int, TrainingSequence]()
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    for index, (sequence, (group, trajectory)) in enumerate(zip(sequences, trajectories, strict=True)):
        sampled_before = trajectory.resumed
        if group.group_id in inherited:
            sampled_before = int(np.count_nonzero(trajectory.response_mask))
        if sampled_before:
            before = np.arange(len(sequence)) < len(group.prompt_of(trajectory)) + _end(trajectory, sampled_before)
            own[index] = dataclasses.replace(
                sequence,
                response_mask=sequence.response_mask & ~before,
                staleness=np.where(before, np.int32(0), sequence.staleness),
            )
            if sequence.response_mask.any():  # tokens left out as too old still influence the trained tokens after them
                prompt = np.zeros(len(sequence) - len(trajectory.tokens), np.bool_)
                sampled = np.concatenate([prompt, trajectory.response_mask])
                taken_over[index] = dataclasses.replace(sequence, response_mask=sampled & before)
    return own, taken_over


def spoiled(
    taken_over: Mapping[int, TrainingSequence], logprobs: Mapping[int, NDArray[np.float32]], *, bound: float
) -> dict[int, str]:
    """Return index -> reason for tokens that are not the policy's: over ``bound`` nats per token and version.

    logprobs  trainer logprobs f32[T] by sequence
    """
    found: dict[int, str] = {}
    for index, sequence in taken_over.items():
        mask = sequence.response_mask
        off = float(np.abs(logprobs[index].astype(np.float64) - sequence.behavior_logprobs)[mask].mean())
        allowed = bound * (1 + max(0, int(sequence.staleness[mask].max())))
        if not off <= allowed:  # NaN is over
            found[index] = (
                f"{np.count_nonzero(mask)} tokens taken over from an earlier attempt are {off:.3g} nats per token off "
                f"the trainer's ({allowed:.3g} are allowed)"
            )
    return found


def _end(trajectory: Trajectory, num_sampled: int) -> int:
    """Return the index after the first ``num_sampled`` sampled tokens."""
    return int(np.flatnonzero(trajectory.response_mask)[num_sampled - 1]) + 1
