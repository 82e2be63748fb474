"""Routing replay: a mixture's router sends tokens to the experts that the engine sent them to (arXiv:2510.11370).

The row carries the engine's choice through Megatron's layers, and each layer hands it to its router in every forward
pass, so it is the right one in a pass that is recomputed, with several rows in flight, and on any stage. Scores are the
learner's own, of those experts, so that the router learns. What Megatron has for this (RouterReplay) is one list of all
models' routers in the process, and needs to be told which pass is which.
Tests: tests/unit/backends/megatron/test_routing_replay.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.layers import RowParameters
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.process_groups import tensor_parallel_group

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer.transformer_layer import TransformerLayer


class Chosen:
    """What a router asks for its choice; Megatron calls it ``router_replay``.

    experts  i64[n, k] of the tokens that come next; negative where the router chooses itself. None: everywhere
    """

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the experts, [n, k] each.  scores [n, experts]"""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, own
        is_chosen = (self.experts >= 0).all(dim=1, keepdim=True)
        experts = torch.where(is_chosen, self.experts, own)
        return scores.gather(1, experts), experts


class SparseLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer with a mixture of experts."""

    def forward(self, *arguments: Any, packed_seq_params: RowParameters, **options: Any) -> Any:
        row = packed_seq_params.row
        assert row is not None
        experts = None if row.experts is None else row.experts[self.layer_number - 1].long()
        if experts is not None and self.config.sequence_parallel:
            group = tensor_parallel_group()
            experts = experts.chunk(group.size())[group.rank()]
        self.mlp.router.router_replay.experts = experts
        return super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
