"""Evaluates saved models without a running run: one engine, one model after the other, all in this process.

It uses the evaluator of a run (actors/learner/evaluator.py), on a bus in memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.base import Actor
from asyncrl.actors.learner.evaluator import Evaluator
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.learner.sample_files import RotatedLines, SampleFile, older_name
from asyncrl.actors.learner.sample_recorder import AnswerRecorder, SampleWriter
from asyncrl.actors.supervisor import supervise
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.adapters import registry
from asyncrl.audit.run_folder import model_folders
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.launch.assembly import data
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.launch.assembly.model_servers import model_server_actor
from asyncrl.launch.assembly.recorders import answer_writer
from asyncrl.launch.checks.run_file import check_evaluation
from asyncrl.logs import print_line
from asyncrl.messages import WeightVersion
from asyncrl.policies.evaluation.questions import digest
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.metric import Metric

RESULTS_FILE: Final = "evaluations.jsonl"
"""File in the run's folder with a line for each evaluated saved model."""
SAY_SECONDS: Final = 30.0
"""Seconds between progress lines on stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """A Hugging Face folder.  step: step that made the model; None if unknown"""

    folder: Path
    step: int | None = None


def saved_models(run: RunConfig) -> list[SavedModel]:
    """Return the saved models in a run's folder, oldest first: models/ and the newest weights."""
    found = dict(sorted(model_folders(run.weights_directory).items())[-1:])
    found |= model_folders(run.run_directory / "models")
    return [
        SavedModel(folder=folder, step=version)
        for (_, version), folder in sorted(found.items())
        if (folder / "config.json").exists()
    ]


def evaluate(run: RunConfig, model: SavedModel, *, answers: SampleFile | None = None) -> dict[str, float] | None:
    """Evaluate one model and return its metrics; None if interrupted. Raises ConfigError and errors of the engine.

    run      [evaluation], [engine], [reward] and [rollout] define the questions, the engine and the judge
    answers  receives the answers to metrics.samples_per_evaluation prompts of each data set, and counts lost ones;
             None: no answers are recorded
    """
    num_recorded = run.metrics.samples_per_evaluation if answers is not None else 0
    run = dataclasses.replace(
        _with_model(run, model),
        bus=dataclasses.replace(run.bus, kind="memory", url="", options={}),
        evaluation=dataclasses.replace(
            run.evaluation, place="dedicated", at_start=True, at_end=False, every_steps=0, enough=1.0
        ),
        checkpoint=dataclasses.replace(run.checkpoint, best=""),
        metrics=dataclasses.replace(run.metrics, samples_per_evaluation=num_recorded),
    )
    check_evaluation(run)
    writer = answer_writer(run, answers, most_kept=0) if answers is not None and num_recorded else None
    return asyncio.run(_evaluate(run, model, writer=writer))


def questions(run: RunConfig, model: SavedModel) -> str:
    """Return a digest of the questions to the models of a run, which share one tokenizer. Raises ConfigError.

    Prints what is odd about the prompts.
    """
    sets = data.open_evaluation_sets(_with_model(run, model))
    for line in (line for its in sets for line in its.oddities):
        print_line(line, out=sys.stderr)
    return digest(sets)


def _with_model(run: RunConfig, model: SavedModel) -> RunConfig:
    return dataclasses.replace(run, model=dataclasses.replace(run.model, path=str(model.folder)))


async def _evaluate(run: RunConfig, model: SavedModel, *, writer: SampleWriter | None) -> dict[str, float] | None:
    sets = await asyncio.to_thread(data.open_evaluation_sets, run)
    bus = await registry.own_bus(run)
    results = _Results()
    recorder = None
    if writer is not None:
        per_dataset = run.metrics.samples_per_evaluation
        recorder = AnswerRecorder(writer, per_dataset=per_dataset, model=model.folder.name, step=model.step or 0)

    try:
        worker, *followers = await build_worker(run, bus=bus, name="evaluate", is_dedicated=True)
        evaluator = Evaluator(
            bus,
            section=run.evaluation,
            sets=sets,
            seed=run.run.seed,
            last_step=-1,
            channel=registry.channel(run, bus=bus),
            metrics=MetricsReporter(bus, [results]),
            table=GroupTable(),
            waits=WaitTracker(),
            recorder=recorder,
        )
        servers = [model_server_actor(run, name, bus=bus) for name in run.started_servers]
        await supervise(_Questioner(bus, evaluator, worker=worker), *servers, worker, *followers)
    finally:
        if writer is not None:
            await writer.stop()
        await bus.close()
    return results.row


class _Results:
    """A Sink for the result of one evaluation."""

    row: dict[str, float] | None = None

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self.row = {name: value for name, value in metrics.items() if isinstance(value, float)}

    def close(self) -> None:
        pass


class _Questioner(Actor):
    """Evaluates the version with which the engine starts, then ends."""

    def __init__(self, bus: Bus, evaluator: Evaluator, *, worker: Actor) -> None:
        super().__init__("evaluation", bus)
        self._evaluator = evaluator
        self._worker = worker

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._evaluator.run()), group.create_task(self._report_progress())]
            await self._evaluator.begin_if_due(WeightVersion(incarnation=0, policy_version=0))
            await self._evaluator.finish_unless(self.draining)
            for task in helpers:
                task.cancel()

    async def _report_progress(self) -> None:
        """consumes: nothing    waits for: the clock    woken by: the clock"""
        while True:
            await asyncio.sleep(SAY_SECONDS)
            settled, asked = self._evaluator.progress
            waits = "; ".join(f"{wait.what} ({wait.seconds:.0f} s)" for wait in self._worker.heartbeat().waits)
            print(f"{settled:,} of {asked:,} prompts are answered; it waits for: {waits}", file=sys.stderr, flush=True)


class Results:
    """The results of a run's models, in RESULTS_FILE of its folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / RESULTS_FILE
        self._lines = RotatedLines(self._file, older=folder / older_name(RESULTS_FILE), most_bytes=sys.maxsize)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, without lines that were cut short when a process was killed."""
        found = []
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:  # the model is evaluated again
                continue
        return found

    def has(self, model: SavedModel, *, questions: str) -> bool:
        """Whether the model has results for all of these questions.  questions: their digest"""
        return any(
            row.get("model") == model.folder.name
            and row.get("questions") == questions
            and row.get("evaluation/complete") == 1.0
            for row in self.rows()
        )

    def add(self, model: SavedModel, run: RunConfig, metrics: Mapping[str, float], *, questions: str) -> None:
        """Append the result. Raises OSError."""
        names = sorted(one.name for one in run.evaluation.datasets)
        row = {"model": model.folder.name, "step": model.step, "datasets": names, "questions": questions, **metrics}
        self._lines.write(json.dumps(row))
