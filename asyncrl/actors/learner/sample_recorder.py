"""Picks some of the groups that leave the window, for people to read (sample_writer.py decodes and writes them).

Tests: tests/actors/learner/test_sample_recorder.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner.sample_writer import SampleWriter
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.groups.sample import picked, reason_of, sample_of
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.staleness.staleness import Forks


class SampleRecorder:
    """Passes picked groups to the writer.

    per_step        number of recorded groups per batch, and of recorded lost groups between two steps
    seed            decides which groups of a batch are picked
    bound           as in sample_of
    has_advantages  whether a batch has advantages when it is taken, and not only after other models have scored it
    """

    def __init__(
        self,
        writer: SampleWriter,
        *,
        per_step: int,
        seed: int = 0,
        bound: int | None = None,
        has_advantages: bool = True,
    ) -> None:
        self._writer = writer
        self._per_step = per_step
        self._seed = seed
        self._bound = bound
        self._has_advantages = has_advantages
        self._lost = 0  # lost groups recorded since the last step

    def note(
        self,
        outcome: Outcome,
        *,
        incarnation: int,
        forks: Forks,
        batch: Batch | None = None,
        tokens: Mapping[int, NDArray[np.float32]] | None = None,
    ) -> None:
        """Record groups that left the window. ``batch``: batch of trained groups;  ``tokens``: StepResult.tokens."""
        of_all = functools.partial(
            sample_of,
            fate=outcome.fate,
            step=outcome.step,
            incarnation=incarnation,
            time=time.time(),
            forks=forks,
            bound=self._bound,
        )
        if outcome.fate == "trained":
            self._lost = 0
            advantages = self._advantages(outcome.groups, batch)
            trainer = _trainer(outcome.groups, batch, tokens or {})
            for index in self.picks(len(outcome.groups), outcome.step):
                known = {"advantages": advantages[index], "trainer": trainer[index]}
                self._writer.write(functools.partial(of_all, outcome.groups[index], **known))
            return
        for group, event in zip(outcome.groups, outcome.events, strict=False):
            if self._lost < self._per_step:
                self._lost += 1
                self._writer.write(functools.partial(of_all, group, reason=reason_of(outcome.fate, event)))

    def picks(self, count: int, step: int) -> list[int]:
        """Return which of the ``count`` groups of a step are recorded."""
        return picked(count, count=self._per_step, seed=self._seed, step=step)

    def _advantages(
        self, groups: Sequence[TrajectoryGroup], batch: Batch | None
    ) -> Sequence[Sequence[NDArray[np.float32]]]:
        """Return for each group f32[T] of each answer; () if unknown."""
        if batch is None or not self._has_advantages:
            return [()] * len(groups)
        documents = iter(batch.documents)
        return [
            [next(documents).advantages[len(group.prompt_of(one)) :] for one in group.trajectories] for group in groups
        ]


def _trainer(
    groups: Sequence[TrajectoryGroup], batch: Batch | None, tokens: Mapping[int, NDArray[np.float32]]
) -> Sequence[Sequence[NDArray[np.float32]]]:
    """Return for each group f32[2, T] of each answer: trainer logprobs and entropies, NaN for untrained tokens.

    () per group if unknown.
    """
    if batch is None or not tokens:
        return [()] * len(groups)
    numbers = iter(range(len(batch.documents)))

    def of_answer(number: int, prompt: int) -> NDArray[np.float32]:
        mask = batch.documents[number].response_mask
        found = np.full((2, len(mask)), np.nan, np.float32)
        if number in tokens:
            trained = np.flatnonzero(mask)
            found[:, trained[trained > 0]] = tokens[number]  # the first token of a document has no logprob
        return found[:, prompt:]

    return [[of_answer(next(numbers), len(group.prompt_of(one))) for one in group.trajectories] for group in groups]
