"""Sections of the run file for the models that the learner holds in addition to the policy.

The algorithm decides which of them a run may or must have (learner_models.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import MOST_KEPT
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """Critic for algorithms that learn values (ppo). Other settings are taken from [learner]."""

    path: str = ""
    """Hugging Face folder of the initial weights, without the output layer: values start at 0. Empty: model.path."""
    learning_rate: float = 0.0
    """Learning rate, often ten times that of the policy; 0: learner.learning_rate."""
    warmup_steps: int = 0
    """Number of first steps that train only the critic. Policy versions still count up, but the policy does not
    change."""
    loss: Literal["mse", "huber"] = "mse"
    """Mean squared error, or the Huber loss."""
    huber_delta: float = 10.0
    """Error above which the Huber loss is linear."""
    scale: float = 0.5
    """Factor of the squared error: 0.5 in most frameworks, 1 in slime."""
    clip: float = 0.5
    """Maximum change of a value from its old value, as in PPO; 0 is off."""

    def __post_init__(self) -> None:
        for name in ("huber_delta", "scale"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("learning_rate", "warmup_steps", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection:
    """Frozen reference model. A KL penalty keeps the policy near it; works with any algorithm."""

    path: str = ""
    """Hugging Face folder; empty: model.path, the initial policy."""
    kl_coef: float = 0.0
    """Penalty per nat of KL(policy || reference), per token; 0 is off, and no reference is loaded."""
    kl: Literal["", "k1", "k2", "k3", "absolute", "low_variance", "unbiased", "k3_weighted"] = ""
    """Estimator (policies/losses/kl.py). Empty: unbiased in the loss (correct on stale data), k1 in the reward (exact
    there)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty applies: in the loss, or subtracted from the reward of each token, for advantages with token
    rewards (gae, reinforce, reinforce_pp)."""

    refresh_steps: int = 0
    """Every so many steps the reference becomes the policy as it is then, and checkpoints hold it; 0: never."""

    def __post_init__(self) -> None:
        if self.kl_coef < 0:
            raise ConfigError(f"kl_coef must be >= 0 (0 is off), got {self.kl_coef}")
        if self.refresh_steps < 0:
            raise ConfigError(f"refresh_steps must be >= 0 (0: never), got {self.refresh_steps}")
        if self.refresh_steps and not self.kl_coef:
            raise ConfigError(
                "refresh_steps refreshes a reference that kl_coef = 0 does not load; set kl_coef, or remove it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """Teacher for algorithms that learn from the logprobs of another model (opd)."""

    path: str = ""
    """Hugging Face folder of the frozen teacher, which the learner loads. It must use the policy's tokenizer."""
    server: str = ""
    """Name of a server of [servers] that is the teacher, in place of path: its model may be larger than the learner's
    GPUs hold. Workers ask it for the logprobs of each answer. Needs rollout.temperature = 1."""
    key: str = ""
    """Key in a row's metadata (data.metadata_key, data.metadata_columns) with the name of its own teacher, a server of
    [servers]; rows without it have ``server``. Empty: all rows have ``server``."""

    top_logprobs: int = 0
    """Number of likeliest tokens that a served teacher names at each place with their logprobs, at most 1,024, for the
    loss distill; 8 bytes each in an answer. SGLang and vLLM can. 0: the logprobs of the answer's tokens alone."""

    @property
    def is_served(self) -> bool:
        return bool(self.server or self.key)

    def __post_init__(self) -> None:
        if bool(self.path) == self.is_served:
            raise ConfigError(
                "set either path, a folder that the learner loads, or server (and key), the name of one of [servers]"
            )
        if not 0 <= self.top_logprobs <= MOST_KEPT:
            raise ConfigError(f"top_logprobs must be 0 to {MOST_KEPT:,}, got {self.top_logprobs}")
        if self.top_logprobs and not self.is_served:
            raise ConfigError(
                "top_logprobs are of a teacher on a server: the learner would have to hold the logits of two models; "
                "set server in place of path, or remove them"
            )
