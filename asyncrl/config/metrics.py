"""[metrics]: where numbers and samples of what the model writes go, and what is warned of."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.addresses import host_and_port
from asyncrl.config.checks import require
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "asyncrl"
    """Project in W&B."""
    console: bool = True
    """Print one line per step."""
    tensorboard: bool = False
    """Write TensorBoard's event files to tensorboard/ of the run's folder. Needs that package, or tensorboardX."""
    prometheus: str = ""
    """HOST:PORT at which the learner answers Prometheus; other processes of its machine take the ports behind it. Each
    writes where it is to prometheus/NAME.json of the run's folder, for file_sd_configs. Empty: none answers."""
    sinks: tuple[str, ...] = ()
    """Sinks of your own, "package.module:Class": they get every number of every step."""
    samples_per_step: int = 2
    """Groups of each step whose answers are written to samples.jsonl as text, and as many of those dropped, failed or
    filtered between two steps; 0 writes none. `asyncrl samples` shows them."""
    samples_per_evaluation: int = 4
    """Prompts of each data set of an evaluation whose answers are written to evaluation_samples.jsonl as text, the same
    prompts every time; 0 writes none. `asyncrl samples --evaluation` shows them."""
    samples_max_bytes: int = 64 * 2**20
    """Most bytes of samples.jsonl and samples.1.jsonl together, and as many of evaluation_samples.jsonl and of
    saved_model_samples.jsonl, each with the one before it; the oldest groups go first."""
    timeline_max_bytes: int = 64 * 2**20
    """Most bytes of timeline.jsonl and timeline.1.jsonl together, which say when each step, group, load and wait was,
    for `asyncrl trace`; the oldest steps go first. 0 writes none."""
    mismatch_alarm: float = 0.05
    """Warn when the mean |trainer - behavior logprob| of fresh samples is larger than this, in nats per token; 0 is
    off. Rounding to bfloat16 in engine and trainer makes 0.005 to 0.02."""
    drop_alarm: float = 0.05
    """Warn when more than this share of the answers of ten steps was too stale to train; 0 is off. Dropped answers are
    mostly long ones."""

    hold_alarm: float = 0.2
    """Warn when the learner waits for old groups (staleness.eviction) for more than this share of ten steps' time while
    engines have nothing to do; 0 is off."""
    split_alarm: float = 0.15
    """Warn when learner or engines were busy for nearly all of ten steps, and another split of the run's GPUs between
    them would train a larger share more tokens a second than this; 0 is off. `asyncrl plan` measures it."""

    def __post_init__(self) -> None:
        for key in ("samples_per_step", "samples_per_evaluation"):
            require(getattr(self, key) >= 0, f"{key} must be >= 0 (0 is off), got {getattr(self, key)}")
        if self.prometheus:
            try:
                host_and_port(self.prometheus)
            except ConfigError as error:
                raise ConfigError(f"prometheus {error}") from None
        least = 2**16
        require(
            self.timeline_max_bytes == 0 or self.timeline_max_bytes >= least,
            f"timeline_max_bytes must be 0 (off) or >= {least:,}, got {self.timeline_max_bytes:,}",
        )
        require(
            self.samples_max_bytes >= least, f"samples_max_bytes must be >= {least:,}, got {self.samples_max_bytes:,}"
        )
        require(self.mismatch_alarm >= 0, f"mismatch_alarm must be >= 0 (0 is off), got {self.mismatch_alarm}")
        require(0 <= self.drop_alarm <= 1, f"drop_alarm must be a share, 0 to 1 (0 is off), got {self.drop_alarm}")
        require(0 <= self.hold_alarm <= 1, f"hold_alarm must be a share, 0 to 1 (0 is off), got {self.hold_alarm}")
        require(self.split_alarm >= 0, f"split_alarm must be >= 0 (0 is off), got {self.split_alarm}")
