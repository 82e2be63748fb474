"""Metrics to Weights & Biases: staleness live. The only file that imports wandb.

Every name of the schema is a panel, grouped by what stands before the slash; histograms (staleness, lengths) are drawn
over steps. WANDB_MODE=offline and the other WANDB_ variables work as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.policies.batching.batch import Histogram, Metric


class WandB:
    """One W&B run a learner; a resumed learner goes on with the same one, whose id is kept in the run's folder."""

    def __init__(self, *, project: str, name: str, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("metrics.wandb: wandb is not installed; pip install 'asyncrl[wandb]'") from None
        self._wandb = wandb
        directory.mkdir(parents=True, exist_ok=True)
        kept = directory / "wandb-id"
        known = kept.read_text() if resume and kept.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=known,
                resume="allow" if known else None,
                dir=str(directory),
                config=dict(config),
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.UsageError as error:  # no API key, say
            raise ConfigError(
                f"metrics.wandb: {error}; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
            ) from error
        kept.write_text(self._run.id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._run.log({"step": step} | {name: self._value(value) for name, value in metrics.items()})

    def _value(self, value: Metric) -> Any:
        if not isinstance(value, Histogram):
            return value
        return self._wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))

    def close(self) -> None:
        self._run.finish()
