"""Sections of the run file for the models that the learner holds beside the policy. Which of them a run may have, and
must have, follows from its algorithm (auxiliary.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """For algorithms that learn values (ppo). Trained as [learner] says, but for what is here."""

    path: str = ""
    """Hugging Face folder that it starts from, but for its output: values start at 0. Empty takes model.path."""
    learning_rate: float = 0.0
    """Usually larger than the policy's, ten times and more; 0 takes learner.learning_rate."""
    warmup_steps: int = 0
    """The first so many steps train the critic alone; the policy's versions go on, its weights stay."""
    loss: Literal["mse", "huber"] = "mse"
    huber_delta: float = 10.0
    """Error from which on Huber's loss is linear."""
    clip: float = 0.5
    """How far a value may move from what it was before the batch; 0 is off."""

    def __post_init__(self) -> None:
        if self.huber_delta <= 0:
            raise ConfigError(f"huber_delta must be > 0, got {self.huber_delta}")
        for name in ("learning_rate", "warmup_steps", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A frozen model that the policy is held near, with any algorithm."""

    path: str = ""
    """Hugging Face folder; empty takes model.path, what the policy started from."""
    kl_coef: float = 0.0
    """What a nat of KL(policy || reference) per token costs; 0 is off, and no reference is loaded."""
    kl: Literal["", "k1", "k2", "k3", "low_variance", "unbiased"] = ""
    """Estimate (policies/kl.py). Empty: unbiased in the loss, right on stale data; k1 in the reward, exact there."""
    kl_in: Literal["loss", "reward"] = "loss"
    """reward: taken off every token's reward, for advantages that know those (gae, reinforce, reinforce_pp)."""

    def __post_init__(self) -> None:
        if self.kl_coef < 0:
            raise ConfigError(f"kl_coef must be >= 0 (0 is off), got {self.kl_coef}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """For algorithms that learn from another model's logprobs (opd)."""

    path: str
    """Hugging Face folder of the frozen model that opd learns from; its tokenizer must be the policy's."""
