"""Writes down the answers to some prompts of every evaluation, for a person to read (state/samples.py).

The prompts of a data set are the same in every evaluation of it, so that the answers to one of them can be read from
version to version.

Tests: tests/actors/learner/test_answer_recorder.py.
"""

from __future__ import annotations

import functools
import random
import time

import numpy as np

from asyncrl.actors.learner.sample_writer import SampleWriter
from asyncrl.messages import TrajectoryGroup, WeightVersion
from asyncrl.messages.evaluation import label_text
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.groups.sample import Asked, evaluated_sample


class AnswerRecorder:
    """per_dataset: prompts of each data set whose answers are recorded

    model, step  of the saved model that is evaluated: its folder's name, and the step that made it; "" where a run
                 evaluates its own versions
    """

    def __init__(self, writer: SampleWriter, *, per_dataset: int, model: str = "", step: int = 0) -> None:
        self._writer = writer
        self._per_dataset = per_dataset
        self._model, self._step = model, step

    def picks(self, its: EvaluationSet) -> frozenset[int]:
        """Places of the prompts of a data set whose answers are recorded."""
        among = len(its.questions)
        return frozenset(random.Random(its.name).sample(range(among), min(among, self._per_dataset)))

    def note(self, group: TrajectoryGroup | None, its: EvaluationSet, place: int, *, weights: WeightVersion) -> None:
        """Answers that count to a prompt that was picked. Those that did not come whole, or to another prompt, are
        lost."""
        question = its.questions[place]
        if group is None or not np.array_equal(group.prompt_tokens, question.tokens):
            self._writer.lose()
            return
        asked = Asked(
            dataset=its.name,
            place=place,
            label=label_text(question.label),
            model=self._model,
            step=self._step if self._model else weights.policy_version,
            incarnation=weights.incarnation,
        )
        self._writer.write(functools.partial(evaluated_sample, group, asked, time=time.time()))
