"""Records some groups and answers for people to read (sample_files.py).

    recorder -> writer -> its thread: decode, write        sinks that show samples take them from the writer

SampleRecorder picks groups that leave the window; AnswerRecorder picks the same prompts of a data set in every
evaluation, so their answers can be compared from version to version. The learner never waits for this. When the thread
falls behind, groups are left out, and the writer logs how many.

Tests: tests/actors/learner/test_sample_recorder.py, tests/actors/learner/test_answer_recorder.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.learner.sample_files import SampleFile
from asyncrl.messages import TrajectoryGroup, WeightVersion
from asyncrl.messages.rollout import label_text
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.groups.sample import (
    Asked,
    Decode,
    GroupSample,
    decoded,
    evaluated_sample,
    picked,
    reason_of,
    sample_of,
)
from asyncrl.policies.groups.states import Outcome
from asyncrl.policies.staleness.staleness import ResumePoints

MOST_WAITING: Final = 64
"""Groups that may wait to be decoded."""
MOST_KEPT: Final = 256
"""Decoded groups kept for sinks that have not taken them yet."""
WRITTEN_SECONDS: Final = 10.0
"""A hanging disk or tokenizer delays callers of ``flush`` no longer than this."""

log = logging.getLogger("asyncrl.learner")


class SampleWriter:
    """
    load_decode   returns the function that decodes tokens; called in the writer's thread
    most_waiting  limit of groups that wait to be decoded
    most_kept     limit of decoded groups that sinks have not taken yet
    """

    def __init__(
        self,
        file: SampleFile,
        *,
        load_decode: Callable[[], Decode],
        most_waiting: int = MOST_WAITING,
        most_kept: int = MOST_KEPT,
    ) -> None:
        self._file = file
        self._load_decode = load_decode
        self._decode: Decode | None = None
        self._room = threading.Semaphore(most_waiting)
        self._has_warned = False
        self._recent: deque[GroupSample] = deque(maxlen=most_kept)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")

    def write(self, make: Callable[[], GroupSample]) -> None:
        """Decode and write the result of ``make`` soon. ``make`` is called in the writer's thread."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._work, make)
        else:
            self._lose("they come faster than their text can be decoded")

    def lose(self) -> None:
        """Count a group that should have been written but was not available."""
        self._file.num_lost += 1

    def _lose(self, problem: str) -> None:
        self.lose()
        if not self._has_warned:
            log.warning("%s: groups are left out: %s", self._file.name, problem)
        self._has_warned = True

    def take(self) -> Sequence[GroupSample]:
        """Return groups decoded since the last call, at most the newest ``most_kept``."""
        taken = []
        while self._recent:
            taken.append(self._recent.popleft())
        return taken

    async def flush(self) -> None:
        """Wait until all groups given so far are decoded and written, but no longer than WRITTEN_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_SECONDS):
                await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def stop(self) -> None:
        """Stop after writing all waiting groups."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        if self._file.num_lost:
            log.warning("%s: %d groups in all were left out", self._file.name, self._file.num_lost)

    def _work(self, make: Callable[[], GroupSample]) -> None:
        try:
            if self._decode is None:
                self._decode = self._load_decode()
            sample = decoded(make(), self._decode)
            self._recent.append(sample)
            self._file.write(sample)
        except Exception as error:  # a tokenizer or disk may raise anything, and samples must not end a run
            self._lose(f"{type(error).__name__}: {error}")
        finally:
            self._room.release()


class SampleRecorder:
    """Passes picked groups to the writer.

    per_step        number of recorded groups per batch, and of recorded lost groups between two steps
    seed            decides which groups of a batch are picked
    bound           as in sample_of
    has_advantages  whether a batch has advantages when it is taken, and not only after the forward passes of other
                    models
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

    def record(
        self,
        outcome: Outcome,
        *,
        incarnation: int,
        resume_points: ResumePoints,
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
            resume_points=resume_points,
            bound=self._bound,
        )
        if outcome.fate == "trained":
            self._lost = 0
            advantages = self._advantages(outcome.groups, batch)
            trainer = _trainer_tokens(outcome.groups, batch, tokens or {})
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
        sequences = iter(batch.sequences)
        return [
            [next(sequences).advantages[len(group.prompt_of(one)) :] for one in group.trajectories] for group in groups
        ]


def _trainer_tokens(
    groups: Sequence[TrajectoryGroup], batch: Batch | None, tokens: Mapping[int, NDArray[np.float32]]
) -> Sequence[Sequence[NDArray[np.float32]]]:
    """Return for each group f32[2, T] of each answer: trainer logprobs and entropies, NaN for untrained tokens.

    () per group if unknown.
    """
    if batch is None or not tokens:
        return [()] * len(groups)
    numbers = iter(range(len(batch.sequences)))

    def of_answer(number: int, prompt: int) -> NDArray[np.float32]:
        mask = batch.sequences[number].response_mask
        found = np.full((2, len(mask)), np.nan, np.float32)
        if number in tokens:
            trained = np.flatnonzero(mask)
            found[:, trained[trained > 0]] = tokens[number]  # the first token of a sequence has no logprob
        return found[:, prompt:]

    return [[of_answer(next(numbers), len(group.prompt_of(one))) for one in group.trajectories] for group in groups]


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

    def record(self, group: TrajectoryGroup | None, its: EvaluationSet, place: int, *, weights: WeightVersion) -> None:
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
