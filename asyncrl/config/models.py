"""Sections of the run file for the models that the learner holds in addition to the policy.

The algorithm decides which of them a run may or must have (learner_models.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.checks import NonNegative, NumKept, OrOff, Positive, require
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection:
    """Critic for algorithms that learn values (ppo). Its ranks, and what is not set here, are those of [learner]."""

    path: str = ""
    """Hugging Face folder of the initial weights, without the output layer: values start at 0. Empty: model.path."""
    learning_rate: NonNegative[float] = 0.0
    """Learning rate, often ten times that of the policy; 0: learner.learning_rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the critic's learning rate, until the run's last step."""
    min_learning_rate: NonNegative[float] = 0.0
    """Final learning rate of the decay."""
    rate_warmup_steps: NonNegative[int] = 0
    """Steps over which the critic's learning rate rises linearly from 0."""
    weight_decay: NonNegative[float] | None = None
    """Weight decay of the critic's AdamW; not set: learner.weight_decay."""
    betas: tuple[float, ...] = ()
    """Betas of the critic's AdamW; empty: learner.betas."""
    eps: NonNegative[float] = 0.0
    """Epsilon of the critic's AdamW; 0: learner.eps."""
    max_grad_norm: NonNegative[float] = 0.0
    """The critic's gradients are clipped to this norm; 0: learner.max_grad_norm."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig for the critic, over those of learner.megatron: the layers of its first
    stage, if it has others than the policy."""
    warmup_steps: NonNegative[int] = 0
    """Number of first steps that train only the critic. Policy versions still count up, but the policy does not
    change."""
    loss: Literal["mse", "huber"] = "mse"
    """Mean squared error, or the Huber loss."""
    huber_delta: Positive[float] = 10.0
    """Error above which the Huber loss is linear."""
    scale: Positive[float] = 0.5
    """Factor of the squared error: 0.5 in most frameworks, 1 in slime."""
    clip: NonNegative[float] = 0.5
    """Maximum change of a value from its old value, as in PPO; 0 is off."""

    def __post_init__(self) -> None:
        require(
            not self.betas or (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)),
            f"betas must be two numbers in [0, 1), got {list(self.betas)}",
        )
        require(
            self.schedule != "constant" or not self.min_learning_rate,
            'min_learning_rate needs a schedule that decays; use schedule = "cosine" or "linear"',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection:
    """Frozen reference model. A KL penalty keeps the policy near it; works with any algorithm."""

    path: str = ""
    """Hugging Face folder; empty: model.path, the initial policy."""
    kl_coef: OrOff[float] = 0.0
    """Penalty per nat of KL(policy || reference), per token; 0 is off, and no reference is loaded."""
    kl: Literal["", "k1", "k2", "k3", "absolute", "low_variance", "unbiased", "k3_weighted"] = ""
    """Estimator (policies/losses/kl.py). Empty: unbiased in the loss (correct on stale data), k1 in the reward (exact
    there)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty applies: in the loss, or subtracted from the reward of each token, for advantages with token
    rewards (gae, reinforce, reinforce_pp)."""

    refresh_steps: OrOff[int] = 0
    """Every so many steps the reference becomes the policy as it is then, and checkpoints hold it; 0: never."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig for the reference, over those of learner.megatron."""

    def __post_init__(self) -> None:
        if self.refresh_steps and not self.kl_coef:
            raise ConfigError(
                "refresh_steps refreshes a reference that kl_coef = 0 does not load; set kl_coef, or remove it"
            )
        require(
            bool(self.kl_coef) or not self.megatron,
            "megatron is for a reference that kl_coef = 0 does not load; set kl_coef, or remove it",
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

    top_logprobs: NumKept = 0
    """Number of likeliest tokens that a served teacher names at each place with their logprobs, at most 1,024, for the
    loss distill; 8 bytes each in an answer. SGLang and vLLM can. 0: the logprobs of the answer's tokens alone."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig for a teacher that the learner loads, over those of learner.megatron."""

    @property
    def is_served(self) -> bool:
        return bool(self.server or self.key)

    def __post_init__(self) -> None:
        if bool(self.path) == self.is_served:
            raise ConfigError(
                "set either path, a folder that the learner loads, or server (and key), the name of one of [servers]"
            )
        require(not (self.megatron and self.is_served), "megatron is for a teacher that the learner loads; remove it")
        if self.top_logprobs and not self.is_served:
            raise ConfigError(
                "top_logprobs are of a teacher on a server: the learner would have to hold the logits of two models; "
                "set server in place of path, or remove them"
            )
