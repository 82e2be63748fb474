"""[metrics]: where metrics and samples of the model's answers are written, and which conditions raise an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.addresses import host_and_port
from asyncrl.config.checks import OrOff, Range, ShareOrOff, require
from asyncrl.errors import ConfigError

_LEAST_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "asyncrl"
    """Project in W&B, and of the sinks in asyncrl/contrib/sinks.py."""
    console: bool = True
    """Print one line per step."""
    tensorboard: bool = False
    """Write TensorBoard event files to tensorboard/ of the run's folder. Requires the package tensorboard or
    tensorboardX."""
    prometheus: str = ""
    """HOST:PORT at which the learner serves Prometheus metrics. Other processes on its machine use the next ports. Each
    process writes its address to prometheus/NAME.json of the run's folder, for file_sd_configs. Empty: off."""
    sinks: tuple[str, ...] = ()
    """More metric sinks, "package.module:Class", of your own or asyncrl.contrib.sinks:MLflow, SwanLab, Trackio. Each
    receives every metric of every step."""
    samples_per_step: OrOff[int] = 2
    """Groups per step whose answers are written as text to samples.jsonl, and the same number of groups that were
    dropped, failed or filtered between two steps; 0 writes none. `asyncrl samples` shows them."""
    samples_per_evaluation: OrOff[int] = 4
    """Prompts per evaluation data set whose answers are written as text to evaluation_samples.jsonl. The prompts are
    the same every time. 0 writes none. `asyncrl samples --evaluation` shows them."""
    samples_max_bytes: Annotated[int, Range(low=_LEAST_BYTES)] = 64 * 2**20
    """Maximum total size of samples.jsonl and samples.1.jsonl. The same limit applies to evaluation_samples.jsonl and
    to saved_model_samples.jsonl, each with its previous file. The oldest groups are deleted first."""
    timeline_max_bytes: int = 64 * 2**20
    """Maximum total size of timeline.jsonl and timeline.1.jsonl, which record the time of each step, group, load and
    wait for `asyncrl trace`. The oldest steps are deleted first. 0 writes none."""
    mismatch_alarm: OrOff[float] = 0.05
    """Warn if the mean |trainer - behavior logprob| of fresh samples exceeds this, in nats per token; 0 is off.
    Rounding to bfloat16 in engine and trainer causes 0.005 to 0.02."""
    drift_alarm: OrOff[float] = 0.4
    """Warn if the policy has moved far from what sampled its tokens: a median over five steps of offpolicy/k3 over the
    entropy; 0 is off. With the default, 23 of 25 recorded runs that lost to synchronous training were reported, and
    2 of 35 others; with 0.2 all 25, and 11. Of later runs, which did not choose it: 28 of 39, and 11 of 59
    (docs/results/old_tokens.md)."""
    drop_alarm: ShareOrOff = 0.05
    """Warn if more than this share of the answers of ten steps was too stale to train; 0 is off. Dropped answers are
    mostly long ones."""

    straggler_alarm: ShareOrOff = 0.2
    """Warn if the learner spends more than this share of the time of ten steps waiting for old groups
    (staleness.eviction) while the engines are idle; 0 is off."""
    split_alarm: ShareOrOff = 0.3
    """Warn if the learner or the engines were busy for nearly all of ten steps while the other side was idle for more
    than this share of the time; 0 is off. `asyncrl plan` measures which split of the GPUs is best."""

    def __post_init__(self) -> None:
        if self.prometheus:
            try:
                host_and_port(self.prometheus)
            except ConfigError as error:
                raise ConfigError(f"prometheus {error}") from None
        require(
            self.timeline_max_bytes == 0 or self.timeline_max_bytes >= _LEAST_BYTES,
            f"timeline_max_bytes must be 0 (off) or >= {_LEAST_BYTES:,}, got {self.timeline_max_bytes:,}",
        )
