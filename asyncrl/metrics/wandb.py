"""Metrics to Weights & Biases: staleness live. The only file that imports wandb.

Every name of the schema is a panel, grouped by what stands before the slash; histograms (staleness, lengths) are drawn
over steps. Recorded groups are tables (``samples``), a row an answer; alarms are alerts. WANDB_MODE=offline and the
other WANDB_ variables work as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.metrics.samples_text import COLUMNS, rows
from asyncrl.policies.batching.batch import Histogram, Metric
from asyncrl.policies.groups.sample import GroupSample

TABLE_ROWS: Final = 64
"""Answers of a table: each is a file that W&B uploads, so it is not one a step."""


class WandB:
    """One W&B run a learner; a resumed learner goes on with the same one, whose id is kept in the run's folder."""

    def __init__(self, *, project: str, name: str, directory: Path, config: Mapping[str, Any], resume: bool) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("metrics.wandb: wandb is not installed; pip install 'asyncrl[wandb]'") from None
        self._wandb = wandb
        self._answers: list[list[Any]] = []
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

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        for sample in samples:
            self._answers += rows(sample)
        if len(self._answers) >= TABLE_ROWS:
            self._log_answers(step)

    def alarm(self, step: int, name: str, text: str) -> None:
        self._run.alert(title=f"{name} at step {step}", text=text, level="WARN")

    def _log_answers(self, step: int) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=self._answers)
        self._answers = []
        self._run.log({"step": step, "samples": table})

    def _value(self, value: Metric) -> Any:
        if not isinstance(value, Histogram):
            return value
        return self._wandb.Histogram(np_histogram=(list(value.counts), list(value.edges)))

    def close(self) -> None:
        if self._answers:
            self._log_answers(max(row[0] for row in self._answers))
        self._run.finish()
