"""Metric sinks for MLflow, SwanLab and Trackio: metrics.sinks = ["asyncrl.contrib.sinks:MLflow"].

Each package is imported when the sink is made, and takes its address and login from its own environment variables.
They get the numbers of a step; histograms and samples are in metrics.jsonl, W&B and TensorBoard.
"""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.metrics.port import Sink
from asyncrl.policies.metric import Metric

_REFUSED_BY_MLFLOW: Final = re.compile(r"[^\w\-. /:]")
"""Characters that are not in names of its metrics."""
_MOST_OF_MLFLOW: Final = 1000
"""Metrics in one request."""


class MLflow(Sink):
    """A run of the experiment metrics.wandb_project; a resumed run is another one of the same name."""

    def __init__(self, run: RunConfig) -> None:
        mlflow = _package("mlflow", "mlflow-skinny")
        self._client, self._row = mlflow.MlflowClient(), mlflow.entities.Metric
        found = self._client.get_experiment_by_name(run.metrics.wandb_project)
        experiment = self._client.create_experiment(run.metrics.wandb_project) if found is None else found.experiment_id
        self._run: str = self._client.create_run(experiment, run_name=run.run.name).info.run_id

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        now = int(1000 * time.time())
        rows = [
            self._row(_REFUSED_BY_MLFLOW.sub("_", name), value, now, step) for name, value in numbers(metrics).items()
        ]
        for begin in range(0, len(rows), _MOST_OF_MLFLOW):  # a request for each number would take longer than a step
            self._client.log_batch(self._run, metrics=rows[begin : begin + _MOST_OF_MLFLOW])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class SwanLab(Sink):
    """An experiment of the project metrics.wandb_project; SWANLAB_MODE=offline writes it to a folder."""

    def __init__(self, run: RunConfig) -> None:
        swanlab = _package("swanlab")
        self._run = swanlab.init(project=run.metrics.wandb_project, name=run.run.name)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._run.log(numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Sink):
    """A run of the project metrics.wandb_project, in a database on this machine or a Hugging Face Space; a resumed run
    goes on."""

    def __init__(self, run: RunConfig) -> None:
        trackio = _package("trackio")
        self._run = trackio.init(project=run.metrics.wandb_project, name=run.run.name, resume="allow", embed=False)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._run.log(numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}


def _package(name: str, of: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"metrics.sinks: {name} is not installed; pip install {of or name}") from None
