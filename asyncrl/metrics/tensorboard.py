"""Writes metrics to TensorBoard event files in RUN_DIR/tensorboard. The only module that imports TensorBoard writers.

`tensorboard --logdir runs` shows every metric under its name in the schema, histograms over steps, recorded samples as
text, and alarms.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.metrics.samples_text import markdown
from asyncrl.policies.groups.sample import EVALUATED, GroupSample
from asyncrl.policies.metric import Histogram, Metric

_WRITERS: Final = ("torch.utils.tensorboard", "tensorboardX")


def writer_class() -> Any:
    """Return the class of an installed writer. Raises ConfigError if none is installed."""
    for module in _WRITERS:
        try:
            return importlib.import_module(module).SummaryWriter
        except ImportError:
            continue
    raise ConfigError("metrics.tensorboard: tensorboard is not installed; pip install tensorboard")


class TensorBoard:
    """The event files of one learner.

    purge_step  first step that this learner trains, if an earlier learner may have trained it: events of the earlier
                learner from this step on are hidden. None: there was no earlier learner
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        """Raises ConfigError if no writer is installed."""
        self._purge_step = purge_step
        self._directory = directory
        self._class = writer_class()
        self._made: Any = None

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        writer = self._writer()
        for name, value in metrics.items():
            if isinstance(value, Histogram):
                if sum(value.counts):
                    _add_histogram(writer, name, value, step)
            elif math.isfinite(value):
                writer.add_scalar(name, value, step)
        writer.flush()

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        for sample in samples:
            name = (
                f"evaluation/{sample.dataset}/prompt_{sample.place}"
                if sample.fate == EVALUATED
                else f"samples/{sample.fate}"
            )
            self._writer().add_text(name, markdown(sample), sample.step if sample.fate == EVALUATED else step)

    def alarm(self, step: int, name: str, text: str) -> None:
        self._writer().add_text(f"alarms/{name}", text, step)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _writer(self) -> Any:
        if self._made is None:
            self._made = self._class(log_dir=str(self._directory), purge_step=self._purge_step)
        return self._made


def _add_histogram(writer: Any, name: str, value: Histogram, step: int) -> None:
    """Add a histogram. Sums are computed as if all values were in the middle of their buckets."""
    lows, highs = value.edges[:-1], value.edges[1:]
    middles = [(low + high) / 2 for low, high in zip(lows, highs, strict=True)]
    there = [index for index, count in enumerate(value.counts) if count]
    writer.add_histogram_raw(
        name,
        min=lows[there[0]],
        max=highs[there[-1]],
        num=sum(value.counts),
        sum=sum(count * middle for count, middle in zip(value.counts, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(value.counts, middles, strict=True)),
        bucket_limits=list(highs),
        bucket_counts=list(value.counts),
        global_step=step,
    )
