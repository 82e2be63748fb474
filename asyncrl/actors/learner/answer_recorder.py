"""Records the answers to some prompts of every evaluation, for people to read (actors/learner/sample_files.py).

It picks the same prompts of a data set in every evaluation, so their answers can be compared from version to version.

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
    """Picks the prompts whose answers are recorded, and passes these answers to the writer.

    per_dataset  number of prompts of each data set whose answers are recorded
    model, step  of a saved model that is evaluated: its folder's name, and the step that made it; "" if a run evaluates
                 its own versions
    """

    def __init__(self, writer: SampleWriter, *, per_dataset: int, model: str = "", step: int = 0) -> None:
        self._writer = writer
        self._per_dataset = per_dataset
        self._model, self._step = model, step

    def picks(self, its: EvaluationSet) -> frozenset[int]:
        """Return the places of the recorded prompts of a data set."""
        among = len(its.questions)
        return frozenset(random.Random(its.name).sample(range(among), min(among, self._per_dataset)))

    def note(self, group: TrajectoryGroup | None, its: EvaluationSet, place: int, *, weights: WeightVersion) -> None:
        """Record counted answers to a picked prompt. Answers without a complete group, or to another prompt, are
        counted as lost."""
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
