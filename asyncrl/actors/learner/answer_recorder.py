"""Writes down the answers to some prompts of every evaluation, for a person to read (state/samples.py).

The prompts are the same in every evaluation, and in every run with the data set: how the answers to one of them change
from version to version can be read one below the other.
"""

from __future__ import annotations

import functools
import random
import time
from typing import Final

from asyncrl.actors.learner.sample_writer import SampleWriter
from asyncrl.messages import TrajectoryGroup, WeightVersion, replace
from asyncrl.messages.evaluation import MOST_PROMPTS
from asyncrl.policies.evaluation.questions import EvaluationSet, Question
from asyncrl.policies.groups.sample import EVALUATED, sample_of

LONGEST_LABEL: Final = 2000
"""Characters that are recorded of what is right: tests of a program may be long."""


class AnswerRecorder:
    """per_dataset: prompts of each data set whose answers are recorded

    saved_step  that made the saved model which is evaluated; None: the version says it
    """

    def __init__(self, writer: SampleWriter, *, per_dataset: int, saved_step: int | None = None) -> None:
        self._writer = writer
        self._per_dataset = per_dataset
        self._saved_step = saved_step

    def picks(self, its: EvaluationSet) -> frozenset[int]:
        """Places of the prompts of a data set whose answers are recorded."""
        among = len(its.questions)
        return frozenset(random.Random(its.name).sample(range(among), min(among, self._per_dataset)))

    def note(self, group: TrajectoryGroup, asked: Question, *, dataset: str, weights: WeightVersion) -> None:
        """Good answers to a prompt that was picked, whole."""
        step = weights.policy_version
        if self._saved_step is not None:  # each saved model is evaluated as version 0, in evaluation 0 of a run
            step = self._saved_step
            group = replace(group, group_id=group.group_id + step * MOST_PROMPTS)
        self._writer.write(
            functools.partial(
                sample_of,
                group,
                fate=EVALUATED,
                step=step,
                incarnation=weights.incarnation,
                time=time.time(),
                dataset=dataset,
                label="" if asked.label is None else str(asked.label)[:LONGEST_LABEL],
            )
        )
