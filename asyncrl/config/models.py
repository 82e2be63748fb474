"""Sections of the run file for the models that the learner holds beside the policy. Which of them a run may have, and
must have, follows from its algorithm (learner_models.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """For algorithms that learn values (ppo). Keys that are not here are as in [learner]."""

    path: str = ""
    """Hugging Face folder of its initial weights, without the output layer: values start at 0. Empty takes
    model.path."""
    learning_rate: float = 0.0
    """Often ten times the policy's; 0 takes learner.learning_rate."""
    warmup_steps: int = 0
    """During the first steps only the critic is trained. Policy versions count up, the policy stays the same."""
    loss: Literal["mse", "huber"] = "mse"
    """Mean squared error, or the Huber loss."""
    huber_delta: float = 10.0
    """Error from which on the Huber loss is linear."""
    scale: float = 0.5
    """What the squared error is multiplied by: 0.5 in most frameworks, 1 in slime."""
    clip: float = 0.5
    """Largest change of a value from its old one, as in PPO; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("huber_delta", "scale"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("learning_rate", "warmup_steps", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection:
    """A frozen model with a KL penalty that keeps the policy near it, for any algorithm."""

    path: str = ""
    """Hugging Face folder; empty takes model.path, where the policy started."""
    kl_coef: float = 0.0
    """Penalty per nat of KL(policy || reference), per token; 0 is off, and no reference is loaded."""
    kl: Literal["", "k1", "k2", "k3", "absolute", "low_variance", "unbiased", "k3_weighted"] = ""
    """Estimator (policies/losses/kl.py). Empty: unbiased in the loss (correct on stale data), k1 in the reward (exact
    there)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss, or reward: subtracted from each token's reward, for advantages with token rewards (gae, reinforce,
    reinforce_pp)."""

    def __post_init__(self) -> None:
        if self.kl_coef < 0:
            raise ConfigError(f"kl_coef must be >= 0 (0 is off), got {self.kl_coef}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """For algorithms that learn from another model's logprobs (opd)."""

    path: str
    """Hugging Face folder of the frozen model that opd learns from, with the policy's tokenizer."""
