"""gpt-oss's mixture: a router and experts with biases, and a clamped gate."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.expert_bias import with_bias
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.mixture import GroupedExperts, Router

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer import TransformerConfig


class BiasedRouter(Router):
    """A router whose logits have a bias, which also counts in the scores."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.bias = torch.nn.Parameter(torch.zeros(config.num_moe_experts, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().gating(hidden) + self.bias.float()


class BiasedExperts(GroupedExperts):
    """Experts with biases, gate_up_bias [experts, 2 F] and down_bias [experts, H], and a clamped gate."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(num_local_experts, config)
        self.gate_up_bias = self._weights(num_local_experts, self.gate_up.shape[1])
        self.down_bias = self._weights(num_local_experts, self.down.shape[1])

    def _mixed(self, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return with_bias(super()._mixed(hidden, ends), self.gate_up_bias, ends)

    def _gate(self, mixed: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return fused.scored_clamped_swiglu(mixed, scores)

    def _output(self, gated: torch.Tensor, ends: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores multiply the last bias, too."""
        return with_bias(super()._output(gated, ends, scores), self.down_bias, ends, scores)
