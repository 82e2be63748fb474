"""Routing replay: a mixture's router sends tokens to the experts that the engine chose (arXiv:2510.11370).

The row carries the engine's choice through Megatron's layers, and each layer gives it to its router in every forward
pass. So the choice is correct in recomputed passes, with several rows in flight, and on any stage. The learner computes
its own scores for these experts, so that the router learns. Megatron's RouterReplay is not used: it keeps one list of
all routers in the process, across models, and must be told which pass is which.
Tests: tests/unit/backends/megatron/test_routing_replay.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncrl.backends.megatron.layers import Layer, RowParameters
from asyncrl.backends.megatron.process_groups import tensor_parallel_group


class Chosen:
    """Supplies a router's choice of experts; Megatron calls this object ``router_replay``.

    experts  i64[n, k] of the next tokens; negative where the router chooses; None if it chooses everywhere
    """

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of the chosen experts, [n, k] each.  scores: [n, experts]"""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, own
        is_chosen = (self.experts >= 0).all(dim=1, keepdim=True)
        experts = torch.where(is_chosen, self.experts, own)
        return scores.gather(1, experts), experts


class SparseLayer(Layer):
    """A layer with a mixture of experts. Its router needs the row: the engine's choice, and what is padding."""

    def forward(self, *arguments: Any, packed_seq_params: RowParameters, **options: Any) -> Any:
        row = packed_seq_params.row
        assert row is not None
        experts = None if row.experts is None else row.experts[self.layer_number - 1].long()
        if experts is not None and self.config.sequence_parallel:
            group = tensor_parallel_group()
            experts = experts.chunk(group.size())[group.rank()]
        router = self.mlp.router
        router.router_replay.experts, router.row = experts, row
        try:
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        finally:  # a router keeps no tensors on the GPU
            router.router_replay.experts = router.row = None
