"""Answers of a run's evaluations in readable form, for `asyncrl samples --evaluation`.

    RUN_DIR/evaluation_samples.jsonl   some prompts of each data set, of every evaluation, decoded
    RUN_DIR/saved_model_samples.jsonl  the same for saved models (`asyncrl evaluate`)
    the bus                            from another machine: answers of the newest evaluation that are on their log

Tests: tests/integration/test_samples.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path

from asyncrl.actors.base import until_finished
from asyncrl.actors.learner import sample_files as sample_file
from asyncrl.audit.run_folder import Address, log_records
from asyncrl.audit.samples import RunSamples, growing
from asyncrl.bus.port import Bus, Record
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers
from asyncrl.messages.topics import EVALUATION, EVALUATION_ANSWERS
from asyncrl.policies.groups.sample import Asked, GroupSample, evaluated_sample


class EvaluationSamples(RunSamples):
    """dataset: only answers of this data set; "": of all data sets"""

    is_of_evaluations = True

    def __init__(self, run: RunConfig, directory: Path | None, *, token: str, dataset: str = "") -> None:
        super().__init__(run, directory, token=token)
        self._dataset = dataset
        self._evaluation: Evaluation | None = None
        self._datasets: set[str] = set()  # data sets with answers

    def read_file(self) -> Iterator[GroupSample]:
        if self.directory is None:
            return
        for name in (sample_file.SAVED_MODELS_FILE, sample_file.EVALUATION_FILE):
            rows = sample_file.read(self.directory, name)
            yield from {row.identity: row for row in rows if self._is_wanted(row)}.values()

    @contextlib.contextmanager
    def bus_address(self) -> Iterator[Address | None]:
        """None if the folder is available, because it has more than the bus."""
        yield self.address if self.directory is None else None

    async def read_log(self, bus: Bus, *, newest: int = 0) -> AsyncGenerator[GroupSample, None]:
        await self._read_evaluation(bus)
        if self._evaluation is None:
            self.why_no_log = "The run has evaluated nothing yet"
            return
        async with contextlib.aclosing(log_records(bus, EVALUATION_ANSWERS, after=self._evaluation.after)) as records:
            async for record in records:
                if (sample := self._of_answers(record)) is not None:
                    yield sample

    async def follow_log(self, bus: Bus) -> AsyncGenerator[GroupSample, None]:
        """Yield answers as they arrive; ends with the run.

        waits for: an arrival, the end of the run    woken by: the bus
        """
        done = await bus.last_sequence(EVALUATION_ANSWERS)
        ended = asyncio.create_task(until_finished(bus))
        try:
            async with bus.read(EVALUATION_ANSWERS, after=done) as records:
                while not ended.done() or done < await bus.last_sequence(EVALUATION_ANSWERS):
                    coming = asyncio.ensure_future(anext(records))
                    await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
                    if not coming.done() and done >= await bus.last_sequence(EVALUATION_ANSWERS):
                        coming.cancel()
                        break
                    record = await coming
                    done = record.sequence
                    number = None if self._evaluation is None else self._evaluation.number
                    if record.message is not None and record.message.number != number:  # another one has begun
                        await self._read_evaluation(bus)
                    if (sample := self._of_answers(record)) is not None:
                        yield sample
        finally:
            ended.cancel()

    def follow_file(self) -> Generator[GroupSample, None, None]:
        assert self.directory is not None
        with contextlib.closing(growing(self.directory / sample_file.EVALUATION_FILE, self.is_over)) as rows:
            yield from filter(self._is_wanted, rows)

    def has_written_all(self) -> bool:
        return False  # an evaluation may take long after the last step

    def why_none(self) -> str:
        """Explain why no answer is shown, after everything available was read."""
        if self._datasets:
            return "Of those that are recorded none is asked for (metrics.samples_per_evaluation prompts a data set)"
        return self.why_no_log or "None is recorded: nothing is evaluated yet, or metrics.samples_per_evaluation = 0"

    def require_dataset(self) -> None:
        """Raise ConfigError for a data set that is neither in the run file nor in the answers read so far."""
        known = {one.name for one in self.run.evaluation.datasets} | self._datasets
        if known and self._dataset not in ("", *known):
            raise ConfigError(f"--evaluation {self._dataset}: no such data set; there are {', '.join(sorted(known))}")

    def _is_wanted(self, row: GroupSample) -> bool:
        self._datasets.add(row.dataset)
        return self._dataset in ("", row.dataset)

    async def _read_evaluation(self, bus: Bus) -> None:
        self._evaluation = (await bus.states(EVALUATION)).get("")

    def _of_answers(self, record: Record[EvaluationAnswers]) -> GroupSample | None:
        """Return a sample if the answers are complete and belong to the newest evaluation. Not decoded."""
        answers, evaluation = record.message, self._evaluation
        if answers is None or answers.group is None or evaluation is None or answers.number != evaluation.number:
            return None
        if not all(evaluation.has_sampled(one.version_spans) for one in answers.answers):
            return None
        asked = Asked(
            dataset=answers.dataset,
            place=answers.place,
            label=answers.label,
            step=evaluation.weights.policy_version,
            incarnation=evaluation.weights.incarnation,
        )
        sample = evaluated_sample(answers.group, asked, time=record.stored / 1e9)
        return sample if self._is_wanted(sample) else None
