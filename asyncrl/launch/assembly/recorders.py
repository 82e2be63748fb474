"""Recorders that write the texts of a run for people to read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.actors.learner.sample_files import EVALUATION_FILE, SampleFile
from asyncrl.actors.learner.sample_recorder import AnswerRecorder, SampleRecorder, SampleWriter
from asyncrl.config import RunConfig
from asyncrl.data.tokenizer import load_decode
from asyncrl.messages.evaluation import MOST_PROMPTS
from asyncrl.policies.algorithms.algorithm import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorders:
    """samples: records groups that were trained or lost;  answers: records evaluations;  writers: those of both"""

    samples: SampleRecorder | None
    answers: AnswerRecorder | None
    writers: Sequence[SampleWriter]


def open_recorders(run: RunConfig, *, algorithm: Algorithm) -> Recorders:
    section, samples, answers, writers = run.metrics, None, None, []
    if section.samples_per_step:
        file = SampleFile(run.run_directory, most_bytes=section.samples_max_bytes)
        writers.append(SampleWriter(file, load_decode=functools.partial(load_decode, run.model.path)))
        samples = SampleRecorder(
            writers[-1],
            per_step=section.samples_per_step,
            seed=run.run.seed,
            bound=run.max_staleness if run.staleness.discard == "tokens" else None,
            has_advantages=not algorithm.outputs_for_advantage,
        )
    if section.samples_per_evaluation and run.evaluation.is_on:
        file = SampleFile(run.run_directory, most_bytes=section.samples_max_bytes, name=EVALUATION_FILE)
        writers.append(answer_writer(run, file, most_kept=MOST_PROMPTS))
        answers = AnswerRecorder(writers[-1], per_dataset=section.samples_per_evaluation)
    return Recorders(samples=samples, answers=answers, writers=writers)


def answer_writer(run: RunConfig, file: SampleFile, *, most_kept: int) -> SampleWriter:
    """Return a writer of evaluation answers to ``file``.

    It leaves none out, because they are few or were all requested.
    """
    return SampleWriter(
        file,
        load_decode=functools.partial(load_decode, run.model.path),
        most_waiting=MOST_PROMPTS,
        most_kept=most_kept,
    )
