"""Plans a replay of a recorded run and trains its steps again, for `asyncrl replay` to compare.

The steps are those in the history of the newest weights. Their groups are read from the log (checkpoint.keep_log =
true). Batches are built, packed and trained by the learner's own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from asyncrl import config
from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.actors.learner.preparation import prepare
from asyncrl.actors.learner.training_step import train
from asyncrl.adapters import learner_models, registry
from asyncrl.audit.recorded_groups import is_answer
from asyncrl.audit.run_folder import RecordedRun, log_records
from asyncrl.backends.port import Backend
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.data.model_folder import check_model
from asyncrl.errors import ConfigError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.metrics.sinks import JsonLines
from asyncrl.policies.audit.entries import HistoryEntry, damage, promotions, steps
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.metric import Metric
from asyncrl.policies.staleness.staleness import ResumePoints
from asyncrl.weights.files import FilesChannel

CHANGEABLE: Final = (
    *("algorithm.", "critic.", "reference.", "teacher.", "learner."),
    *("staleness.weight", "staleness.learning_rate", "model.dtype"),
)
"""Allowed prefixes for --set. The rest of a run file has no effect once the batches are known."""


class Planned(NamedTuple):
    """One step to train: its line of the history, the line that began its incarnation, and its run file.

    The run file is that of the incarnation; or the step is number ``number`` of a different run file.
    """

    entry: HistoryEntry
    begun: HistoryEntry
    resume_points: ResumePoints
    run: RunConfig
    number: int = 0

    @property
    def step(self) -> int:
        return self.number or self.entry.step


def plan_of(
    recorded: RecordedRun, history: Sequence[HistoryEntry], *, from_step: int, overrides: Sequence[str]
) -> tuple[list[Planned], Path | None]:
    """Return the steps to train, and the backend folder to start from (None: the run's model). Raises ConfigError."""
    trained = list(steps(history))
    last = trained[-1][0].step if trained else 0
    if not 1 <= from_step <= last:
        raise ConfigError(f"--from-step {from_step}: {recorded.directory} has steps 1 to {last}")
    for item in overrides:
        if not item.startswith(CHANGEABLE) or item.startswith("learner.groups_per_batch"):
            raise ConfigError(f"--set {item}: a replay has its batches already; change {', '.join(CHANGEABLE)}...")
    done, folder = recorded.checkpoint_before(from_step, history)
    trained = [one for one in trained if one[0].step > done]
    if [one[0].step for one in trained] != list(range(done + 1, last + 1)):
        raise ConfigError(
            f"{recorded.directory}: {'; '.join(damage(history))}; only steps behind a checkpoint that was made after "
            "that can be replayed, with --from-step"
        )
    for step in promotions(history):
        if done < step < last:
            raise ConfigError(
                f"{recorded.directory}: step {step + 1} went on from the state of a shadow (`asyncrl promote`), not "
                f"from that of step {step}; only steps behind it can be replayed, with --from-step {step + 1}"
            )
    plan: list[Planned] = []
    for entry, begun, resume_points in trained:
        run = recorded.settings(begun)
        if not run.checkpoint.keep_log:
            raise ConfigError(
                f"{recorded.directory}: checkpoint.keep_log was off, so what was trained is no longer on the log; only "
                "a run with checkpoint.keep_log = true can be replayed"
            )
        if entry.step >= from_step:
            run = change_settings(begun, overrides)
        if not plan or plan[-1].run != run:
            _check(run)
        plan.append(Planned(entry, begun, resume_points, run))
    return plan, folder


def plan_from(
    recorded: RecordedRun, history: Sequence[HistoryEntry], *, run: RunConfig, batches: tuple[int, int], times: int
) -> list[Planned]:
    """Plan to train the batches of steps ``batches`` (first, last) of ``recorded``, ``times`` times.

    Each is a step of ``run``, whose model is the starting point. Raises ConfigError.
    """
    trained = [one for one in steps(history) if batches[0] <= one[0].step <= batches[1]]
    if not trained:
        last = max((entry.step for entry, _, _ in steps(history)), default=0)
        raise ConfigError(f"--batches: {recorded.directory} has steps 1 to {last}")
    for _, begun, _ in trained:
        settings = recorded.settings(begun)
        if not settings.checkpoint.keep_log:
            raise ConfigError(
                f"--from {recorded.directory}: checkpoint.keep_log was off, so what was trained is no longer on its log"
            )
        if (sampled := settings.rollout.temperature) != run.rollout.temperature:
            raise ConfigError(
                f"rollout.temperature: {recorded.directory} sampled at {sampled:g}, and logits would be divided by "
                f"{run.rollout.temperature:g}; add --set rollout.temperature={sampled:g}"
            )
    _check(run)
    return [Planned(*one, run=run, number=number) for number, one in enumerate(trained * times, 1)]


def _check(run: RunConfig) -> None:
    """Check now what would otherwise fail when the trainer starts, perhaps after an hour. Raises ConfigError."""
    learner_models.check_folders(run, registry.algorithm(run))
    backend = registry.backend_class(run)
    backend.check(run)
    backend.check_machine(run)


def change_settings(begun: HistoryEntry, overrides: Sequence[str]) -> RunConfig:
    table = json.loads(json.dumps(begun.settings))
    for item in overrides:
        config.override(table, item)
    return config_record.from_table(table, where="--set")


async def train_again(
    plan: Sequence[Planned], bus: Bus, *, folder: Path | None, out: Path
) -> AsyncGenerator[tuple[int, Mapping[str, Metric]], None]:
    """Train every step of ``plan`` from the backend state in ``folder`` and yield (step, metrics).

    Writes its files to ``out``.
    """
    loop = asyncio.get_running_loop()
    needed = {group_id: planned.entry for planned in plan for group_id in planned.entry.groups}
    uses = Counter(group_id for planned in plan for group_id in planned.entry.groups)
    vocabulary = {path: check_model(Path(path)).vocab_size for path in {planned.run.model.path for planned in plan}}
    held: dict[int, TrajectoryGroup] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="backend") as thread, contextlib.ExitStack() as stack:
        trainer = ReplayTrainer(out)
        stack.callback(lambda: thread.submit(trainer.close).result())
        sink = JsonLines(out / "metrics.jsonl")
        stack.callback(sink.close)
        async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
            for planned in plan:
                entry = planned.entry
                while missing := [group_id for group_id in entry.groups if group_id not in held]:
                    record = await anext(records, None)
                    if record is None:
                        raise ConfigError(f"step {entry.step} trained group {missing[0]}, which is not on the log")
                    if not is_answer(record):
                        continue
                    group = record.message
                    assert group is not None
                    trained = needed.get(group.group_id)
                    if trained is not None and trained.is_record_of(group.group_id, record.sequence):
                        held.setdefault(group.group_id, group)
                groups = [held[group_id] for group_id in entry.groups]
                _check_tokens(groups, planned, vocabulary[planned.run.model.path])
                uses.subtract(entry.groups)
                held = {group_id: group for group_id, group in held.items() if uses[group_id]}
                step = functools.partial(
                    trainer.step,
                    groups,
                    run=planned.run,
                    folder=folder,
                    step=entry.step,
                    max_staleness=planned.begun.max_staleness,
                    resume_points=planned.resume_points,
                    number=planned.number,
                )
                _, metrics = await loop.run_in_executor(thread, step)
                sink.write(planned.step, metrics)
                yield planned.step, metrics
        last = plan[-1]
        await loop.run_in_executor(
            thread, functools.partial(trainer.export, incarnation=last.entry.incarnation, version=last.step)
        )


def _check_tokens(groups: Sequence[TrajectoryGroup], planned: Planned, vocabulary: int) -> None:
    """Raise ConfigError for tokens outside of the model's vocabulary, which another model sampled."""
    largest = max(
        int(tokens.max())
        for group in groups
        for tokens in (
            group.prompt_tokens,
            *(t for one in group.trajectories for t in (group.prompt_of(one), one.tokens)),
        )
    )
    if largest >= vocabulary:
        raise ConfigError(
            f"model.path: {planned.run.model.path} has {vocabulary:,} tokens, and step {planned.entry.step} has token "
            f"{largest:,}: it was sampled by a model with another vocabulary"
        )


class ReplayTrainer:
    """Trains recorded steps on one backend, and applies changes of settings between steps. Blocking.

    Call all methods from one thread, as the learner does: a backend may be bound to the thread that started
    it.
    """

    def __init__(self, directory: Path, *, recorded: Path | None = None) -> None:
        """recorded: folder of the run that is trained again, which has its images; None: as its settings say"""
        self._directory, self._recorded = directory, recorded
        self._run: RunConfig | None = None
        self._backend: Backend | None = None
        self._hooks: dict[tuple[str, ...], Hooks] = {}

    def step(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        run: RunConfig,
        folder: Path | None,
        step: int,
        max_staleness: int,
        resume_points: ResumePoints,
        number: int = 0,
    ) -> tuple[Batch, dict[str, Metric]]:
        """Train on ``groups``, which the run trained in step ``step``. Return the batch and the step's metrics.

        run     settings of the step
        number  number of this step here, if it differs from ``step``

        The first step starts from ``folder`` (of a checkpoint), or from the run's model if ``folder`` is None.
        """
        backend = self._backend_for(run, folder)
        algorithm, hooks = registry.algorithm(run), self.hooks_of(run)
        batch, mini_batches = prepare(
            [hooks.group(group) for group in groups],
            run=run,
            algorithm=algorithm,
            hooks=hooks,
            shares_prefixes=registry.shared_prefixes(run).is_on,
            policy_version=step - 1,
            max_staleness=max_staleness,
            resume_points=resume_points,
            image_reader=self._image_reader_of(run, groups),
        )
        result = train(run, backend, batch, mini_batches, algorithm=algorithm, step=(number or step) - 1)
        return batch, dict(batch.metrics) | dict(result.metrics)

    @property
    def has_trained(self) -> bool:
        return self._backend is not None

    def save(self, folder: Path) -> None:
        """Save the backend's state, as in a checkpoint, to an empty folder."""
        assert self._backend is not None
        self._backend.save(folder)

    def export(self, *, incarnation: int, version: int) -> None:
        """Write the current weights as a model folder."""
        assert self._backend is not None and self._run is not None
        model, quantization = Path(self._run.model.path), self._run.weights.quantization
        channel = FilesChannel(self._directory / "weights", keep=1, model_path=model, quantization=quantization)
        channel.publish(self._backend.export(), incarnation=incarnation, policy_version=version)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = None

    def hooks_of(self, run: RunConfig) -> Hooks:
        """Return the hooks of these settings, made once. Raises ConfigError."""
        if (names := run.algorithm.hooks) not in self._hooks:
            self._hooks[names] = Hooks(names)
        return self._hooks[names]

    def _image_reader_of(self, run: RunConfig, groups: Sequence[TrajectoryGroup]) -> ImageReader | None:
        """Return what makes patches of the groups' images; those of environments are in the groups themselves."""
        if not any(one.images for group in groups for one in group.trajectories):
            return None
        if (image_reader := ImageReader.of_run(run, directory=self._recorded)) is None:
            raise ConfigError(f"model.path: {run.model.path} reads text alone, and the run's answers show images")
        for data in (data for group in groups for data in group.image_files.values()):
            image_reader.store.add(data)
        return image_reader

    def _backend_for(self, run: RunConfig, folder: Path | None) -> Backend:
        """Return the backend. If the settings changed, recreate it with the same state."""
        if self._backend is not None and run == self._run:
            return self._backend
        between = self._directory / ".between"
        try:
            if self._backend is not None:
                folder = between
                folder.mkdir()
                self._backend.save(folder)
                self.close()
            made = registry.backend(run)
            made.start()
            self._backend, self._run = made, run
            if folder is not None:
                made.restore(folder)
        finally:
            shutil.rmtree(between, ignore_errors=True)
        return made
