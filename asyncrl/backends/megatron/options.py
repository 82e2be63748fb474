"""[learner.options] of the megatron backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the megatron backend."""

    distributed_optimizer: bool = True
    """With several ranks, shard the float32 weights and AdamW's moments over them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. selective: only cheap activations (norms and gates); saves a fifth of the memory at
    almost no cost. full: all but one activation per layer; a third more work.
    """
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory between steps: 8 bytes a parameter, copied both ways every step."""
    overlap_tensor_parallel: bool = True
    """Tensor-parallel ranks exchange rows during products, if their GPUs can access each other's memory."""
    aux_loss_coefficient: float = 0.0
    """Coefficient of the load-balancing loss of mixtures of experts (Switch Transformer, arXiv:2101.03961). The loss of
    a packed row in a layer is 1 if the router prefers all experts alike, usually more otherwise. It is averaged over
    the batch by tokens, prompts included, and summed over layers. As Megatron's --moe-aux-loss-coeff. 0, usual for
    reinforcement learning, is off.
    """
    timeout_seconds: float = 600.0
    """Timeout for ranks waiting for one another, in seconds: 1 to 1000000. A rank that makes no progress for so long
    ends the learner; one that dies does so at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.aux_loss_coefficient < math.inf:
            raise ConfigError(f"aux_loss_coefficient must be 0 or more, got {self.aux_loss_coefficient:g}")
        if not 1 <= self.timeout_seconds <= 1_000_000:
            raise ConfigError(f"timeout_seconds must be 1 to 1000000, got {self.timeout_seconds:g}")
