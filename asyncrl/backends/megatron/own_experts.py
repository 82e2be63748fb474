"""Token dispatch where a rank has all experts of a mixture, so no token moves between ranks.

Megatron's dispatchers copy the token count of each expert to the host, and wait for it in every layer. This one never
waits for the device.
Test: test_tokens_reach_their_experts_and_come_back_without_a_wait.
"""

from __future__ import annotations

import torch

from asyncrl.backends.kernels.expert_rows import ExpertRows
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


class OwnExperts(MoETokenDispatcher):  # type: ignore[misc]
    """Implements the steps of Megatron's dispatchers, in Megatron's order."""

    def __init__(self, experts_per_token: int) -> None:
        """Does not call Megatron's constructor, which requires process groups."""
        self._experts_per_token = experts_per_token

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [..., H], routing_map bool[n, experts], scores f32[n, experts] -> rows [n k, H] and their scores"""
        self._shape = hidden.shape
        num_experts = routing_map.shape[1]
        numbers = torch.arange(num_experts, 0, -1, device=hidden.device)  # distinct, because topk does not order ties
        experts = (routing_map * numbers).topk(self._experts_per_token, dim=1).indices
        self._rows = ExpertRows.of(experts, num_experts)
        chosen = scores.gather(1, experts).flatten().index_select(0, self._rows.order)
        return self._rows.spread(hidden.reshape(-1, self._shape[-1])), chosen

    def token_dispatch(self, rows: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, scores

    def dispatch_postprocess(
        self, rows: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return rows, self._rows.counts, scores

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        return self._rows.gathered(rows).view(self._shape)
