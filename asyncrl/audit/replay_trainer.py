"""Trains the steps of a recorded run again on one backend, and applies changes of settings between steps. Blocking."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from asyncrl.actors.learner.trainer import schedule_of
from asyncrl.actors.learner.training_step import TrainingStep
from asyncrl.adapters import learner_models, registry
from asyncrl.backends.port import Backend
from asyncrl.config import RunConfig
from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.batching import batch as batches
from asyncrl.policies.batching.batch import Metric
from asyncrl.policies.batching.packing import pack_parts
from asyncrl.policies.staleness.staleness import Forks, age_weight
from asyncrl.weights.files import FilesChannel


class Trainer:
    """Call all methods from one thread, as the learner does: a backend may be bound to the thread that started it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run: RunConfig | None = None
        self._backend: Backend | None = None

    def step(
        self,
        groups: Sequence[TrajectoryGroup],
        *,
        run: RunConfig,
        folder: Path | None,
        step: int,
        max_staleness: int,
        forks: Forks,
        number: int = 0,
    ) -> dict[str, Metric]:
        """Train on ``groups``, which the run trained in step ``step``, and return the step's metrics.

        run     settings of the step
        number  number of this step here, if it differs from ``step``

        The first step starts from ``folder`` (of a checkpoint), or from the run's model if ``folder`` is None.
        """
        backend = self._backend_for(run, folder)
        algorithm, section = registry.algorithm(run), run.staleness
        batch = batches.build(
            groups,
            algorithm=algorithm,
            policy_version=step - 1,
            max_staleness=max_staleness,
            forks=forks,
            age_weight=age_weight(section.weight, rate=section.weight_rate, max_staleness=run.max_staleness),
            too_old=section.parts,
        )
        parts = pack_parts(
            batch.documents,
            parts=batch.parts,
            ranks=run.learner.data_parallel,
            max_tokens=run.learner.micro_batch_tokens,
        )
        training = TrainingStep(backend, algorithm=algorithm, **learner_models.training_options(run))
        done = (number or step) - 1
        rate = training.learning_rate(done, schedule=schedule_of(run))
        result = training(batch, parts, step=done, learning_rate=rate)
        return dict(batch.metrics) | dict(result.metrics)

    def export(self, *, incarnation: int, version: int) -> None:
        """Write the current weights as a model folder."""
        assert self._backend is not None and self._run is not None
        channel = FilesChannel(self._directory / "weights", keep=1, model_path=Path(self._run.model.path))
        channel.publish(self._backend.export(), incarnation=incarnation, policy_version=version)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend = None

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
