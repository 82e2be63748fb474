"""Tokens to experts and back where a rank has all of a mixture's experts: nothing travels.

Megatron's dispatchers copy the number of each expert's tokens to the host, and wait for it in every layer; here nothing
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
    """Megatron's steps of a dispatcher, in its order."""

    def __init__(self, experts_per_token: int) -> None:
        """Megatron's own would ask for groups of ranks."""
        self._experts_per_token = experts_per_token

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [..., H], routing_map bool[n, experts], scores f32[n, experts] -> rows [n k, H], their scores"""
        self._shape = hidden.shape
        num_experts = routing_map.shape[1]
        numbers = torch.arange(num_experts, 0, -1, device=hidden.device)  # all different: ties would have no order
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
