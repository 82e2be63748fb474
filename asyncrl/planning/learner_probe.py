"""Measures how long a step of the run's learner takes, with its own backend, algorithm and packing.

It trains on groups that an engine sampled.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncrl.actors.learner.preparation import prepare
from asyncrl.actors.learner.training_step import learning_rates, train_batch
from asyncrl.adapters import registry
from asyncrl.backends.port import Backend
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError
from asyncrl.messages import TrajectoryGroup
from asyncrl.planning.simulation import TrainReading
from asyncrl.planning.together import Together
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.hooks import Hooks

WARM_UP_STEPS: Final = 2
"""The first steps compile kernels and allocate memory."""
LEAST_STEPS: Final = 2
"""Minimum number of timed steps for each size."""
LARGER_ROWS: Final = 2
"""Factor of learner.micro_batch_tokens that is tried in addition."""

log = logging.getLogger("asyncrl.plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMeasured:
    """readings: steps of the smallest learner (Units.copy), including copying the weights for engines.

    larger  tokens per second with LARGER_ROWS times the packed tokens per forward pass, divided by those with the
            run's; 0 if they do not fit, None if a batch has too few tokens to measure it
    """

    readings: tuple[TrainReading, ...]
    larger: float | None


def measure_learner(
    run: RunConfig, groups: Sequence[TrajectoryGroup], together: Together | None = None, *, seconds: float
) -> LearnerMeasured:
    """Time steps on batches of two sizes for about ``seconds``.

    together: while an engine on the same GPUs samples; larger rows are not tried

    Blocks. Raises ConfigError and errors of the backend.
    """
    algorithm, backend = registry.algorithm(run), registry.backend(run)
    try:
        if together is not None:
            together.engine_samples.wait()
            if together.steps_end.is_set():
                raise AsyncRLError("the engine on the learner's GPUs failed")
        backend.start()
        probe = _Probe(run, backend, algorithm, groups)
        large = probe.fitting(seconds / 4)
        sizes = sorted({max(1, large // 4), large})
        probe.step(large, rows=run.learner.micro_batch_tokens)  # compiles the kernels for this size
        if together is not None:
            together.steps_begin.set()
        until, readings = time.monotonic() + seconds, list[TrainReading]()
        for count, size in enumerate(itertools.cycle(sizes)):
            if count >= LEAST_STEPS * len(sizes) and time.monotonic() > until:
                break
            readings.append(probe.step(size, rows=run.learner.micro_batch_tokens))
        if together is not None:
            together.steps_end.set()
            return LearnerMeasured(readings=tuple(readings), larger=None)
        return LearnerMeasured(readings=tuple(readings), larger=_larger(run, probe, large, readings))
    finally:
        backend.close()


def _larger(run: RunConfig, probe: _Probe, size: int, readings: Sequence[TrainReading]) -> float | None:
    """Measure larger micro-batches. This must come last, because running out of memory may leave the backend broken."""
    rows = LARGER_ROWS * run.learner.micro_batch_tokens
    own = [one for one in readings if one.tokens == max(reading.tokens for reading in readings)]
    if own[0].tokens < rows * run.learner.data_parallel:
        return None
    try:
        probe.step(size, rows=rows)
        larger = [probe.step(size, rows=rows) for _ in range(LEAST_STEPS)]
    except Exception as error:  # errors for a lack of memory depend on the backend
        log.warning("learner.micro_batch_tokens = %d does not fit: %s", rows, str(error).partition("\n")[0])
        return 0.0
    return min(one.seconds for one in own) / min(one.seconds for one in larger)


class _Probe:
    def __init__(
        self, run: RunConfig, backend: Backend, algorithm: Algorithm, groups: Sequence[TrajectoryGroup]
    ) -> None:
        self._run, self._backend, self._algorithm, self._groups = run, backend, algorithm, groups
        self._step = run.critic.warmup_steps if run.critic else 0  # from then on the policy trains too

    def fitting(self, seconds: float) -> int:
        """Return how many groups a batch may have to take at most ``seconds``, up to the run's batch. Warms up."""
        size = max(1, self._run.learner.groups_per_batch // 4)
        for _ in range(WARM_UP_STEPS):
            reading = self.step(size, rows=self._run.learner.micro_batch_tokens)
        return max(1, min(self._run.learner.groups_per_batch, int(size * seconds / reading.seconds)))

    def step(self, size: int, *, rows: int) -> TrainReading:
        """Train ``size`` groups, with ``rows`` packed tokens per forward pass."""
        groups = list(itertools.islice(itertools.cycle(self._groups), size))
        learner = dataclasses.replace(self._run.learner, micro_batch_tokens=rows)
        batch, mini_batches = prepare(
            groups,
            run=dataclasses.replace(self._run, learner=learner),
            algorithm=self._algorithm,
            hooks=Hooks(),
            shares_prefixes=registry.shared_prefixes(self._run).is_on,
            policy_version=0,
            max_staleness=self._run.max_staleness,
            resume_points={},
            image_reader=None,
        )
        began = time.monotonic()
        _, critic_rate = learning_rates(self._run, self._step)
        train_batch(
            self._backend,
            batch,
            mini_batches,
            algorithm=self._algorithm,
            step=self._step,
            learning_rate=self._run.learner.learning_rate,
            critic_learning_rate=critic_rate,
            layout=self._run.learner.layout,
        )
        self._backend.export()
        self._step += 1
        return TrainReading(tokens=sum(map(len, batch.sequences)), seconds=time.monotonic() - began)
