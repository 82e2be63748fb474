"""Mixtures of experts: Megatron's layer around our router and experts, which need no package besides torch.

Routing replay: a mixture's router sends tokens to the experts that the engine chose (arXiv:2510.11370). The row carries
the engine's choice through Megatron's layers, and each layer gives it to its router in every forward pass. So the
choice is correct in recomputed passes, with several rows in flight, and on any stage. The learner computes its own
scores for these experts, so that the router learns. Megatron's RouterReplay is not used: it keeps one list of all
routers in the process, across models, and must be told which pass is which.
Tests: tests/unit/backends/megatron/test_routing_replay.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.expert_bias import with_bias
from asyncrl.backends.kernels.expert_rows import ExpertRows
from asyncrl.backends.kernels.rounded_experts import rounded_product
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import Adapter
from asyncrl.backends.megatron.layers import Layer, RowParameters, recompute_selectively
from asyncrl.backends.megatron.load_balance import RouterTally, with_loss
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.process_groups import tensor_parallel_group
from asyncrl.backends.megatron.row_part import RowPart

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec


class RoutingReplay:
    """Supplies a router's choice of experts; Megatron calls this object ``router_replay``.

    experts  i64[n, k] of the next tokens; negative where the router chooses; None if it chooses everywhere
    chosen   i64[n, k] of the last tokens
    """

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None
        self.chosen: torch.Tensor | None = None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of the chosen experts, [n, k] each.  scores: [n, experts]"""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chosen = own
        if self.experts is None:
            return values, own
        is_chosen = (self.experts >= 0).all(dim=1, keepdim=True)
        self.chosen = experts = torch.where(is_chosen, self.experts, own)
        return scores.gather(1, experts), experts


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's choice of experts, from float32 logits. (Megatron 0.16's own logits need Transformer Engine.)

    row    the row that is routed; None between passes
    tally  what was routed in the passes of a step
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.router_replay = RoutingReplay()
        self.row: RowPart | None = None
        self.tally = RouterTally()

    def gating(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight.float())

    def routing(self, logits: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores, is_chosen = super().routing(logits, *arguments, **options)
        if self.row is None or not torch.is_grad_enabled():
            return scores, is_chosen
        loss = self.tally.add(self.row, self.config, logits.flatten(0, -2), is_chosen)
        return scores if loss is None else with_loss(scores, loss), is_chosen

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """Keep the bias in float32 when the model is cast: 16 bits would choose other experts."""
        super()._apply(*arguments, **options)
        self._maintain_float32_expert_bias()
        return self


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The experts of this rank, SwiGLUs without biases, in two matrix products for any number of experts.

    gate_up [experts, 2 F, H], down [experts, H, F]. Of ranks that share an expert, each has a part of F, and Megatron's
    dispatcher gives all of them its tokens and adds up what they return.

    int4_group: numbers of a row that share a scale, if the experts compute with the weights that engines have in 4 bits
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        size, width = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size, config.hidden_size
        self.num_local_experts = num_local_experts
        self.gate_up = self._weights(num_local_experts, 2 * size, width)
        self.down = self._weights(num_local_experts, width, size)
        self.int4_group = 0
        self.gate_up_adapter: Adapter | None = None
        self.down_adapter: Adapter | None = None

    def _weights(self, *sizes: int) -> torch.nn.Parameter:
        weights: Any = torch.nn.Parameter(torch.empty(*sizes, dtype=self.config.params_dtype))
        config = self.config  # False: Megatron sums gradients over the ranks with these experts, not over replicas
        around = (config.expert_model_parallel_size, config.expert_tensor_parallel_size)
        weights.allreduce = max(*around, config.tensor_model_parallel_size) == 1
        return weights  # type: ignore[no-any-return]

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """hidden [N, H], sorted by expert; scores f32[N] -> [N, H].

        The router's scores are applied between the two products, where a token has fewer numbers.
        """
        ends = tokens_per_expert.cumsum(0).to(torch.int32).to(hidden.device)
        mixed = self._mixed(hidden, ends)
        gated = self._gate(mixed, scores)
        with recompute_selectively(self.config, gated, self._gate, mixed, scores):
            return self._output(gated, ends, scores), None

    def _mixed(self, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self._apply_experts(hidden, self.gate_up, self.gate_up_adapter, ends)

    def _gate(self, mixed: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return fused.scored_swiglu(mixed, scores)

    def _output(self, gated: torch.Tensor, ends: torch.Tensor, _scores: torch.Tensor) -> torch.Tensor:
        return self._apply_experts(gated, self.down, self.down_adapter, ends)

    def _apply_experts(
        self, x: torch.Tensor, weights: torch.Tensor, adapter: Adapter | None, ends: torch.Tensor
    ) -> torch.Tensor:
        """x [N, in], sorted by expert; weights [experts, out, in]; rows of expert i end at ends[i] -> [N, out]"""
        if self.int4_group:
            return rounded_product(x, weights, ends, self.int4_group)
        output = F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return output if adapter is None or not adapter.is_on else output + adapter.forward_experts(x, ends)


# -- gpt-oss: a router and experts with biases, and a clamped gate -----------------------------------------------------


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


# -- the layer ---------------------------------------------------------------------------------------------------------


class OwnExperts(MoETokenDispatcher):  # type: ignore[misc]
    """Token dispatch where a rank has all experts of a mixture, so no token moves between ranks.

    Megatron's dispatchers copy the token count of each expert to the host, and wait for it in every layer. This one
    never waits for the device. It implements the steps of Megatron's dispatchers, in Megatron's order.
    """

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
        self._rows = ExpertRows.from_choices(experts, num_experts)
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
        return self._rows.gather(rows).view(self._shape)


class Mixture(MoELayer):  # type: ignore[misc]
    """Megatron's layer, except that the dispatcher drops the scores of the last pass.

    The scores would hold the pass's graph, which holds the parameters' hooks, which hold the model. Python cannot
    collect a cycle through a graph.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if config.expert_model_parallel_size == config.expert_tensor_parallel_size == 1:
            self.token_dispatcher = OwnExperts(config.moe_router_topk)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        result = super().forward(*arguments, **options)
        self.token_dispatcher.probs = None
        if (exchange := getattr(self.token_dispatcher, "_comm_manager", None)) is not None:  # DeepEP's
            exchange.token_probs = exchange.dispatched_probs = None
        return result


class SparseLayer(Layer):
    """A layer with a mixture of experts. Its router needs the row: the engine's choice, and what is padding."""

    def forward(self, *arguments: Any, packed_seq_params: RowParameters, **options: Any) -> Any:
        row = packed_seq_params.row
        assert row is not None
        experts = row.experts_of(self.layer_number - 1)
        if experts is not None and self.config.sequence_parallel:
            group = tensor_parallel_group()
            experts = experts.chunk(group.size())[group.rank()]
        router, routing = self.mlp.router, row.routing
        if routing is not None and routing.is_complete:  # it holds the engine's choice, too
            experts = routing.by_layer[self.layer_number].long()
        router.router_replay.experts, router.row = experts, row
        try:
            result = super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
            if routing is not None and not routing.is_complete:
                routing.by_layer[self.layer_number] = router.router_replay.chosen.to(torch.int16)
            return result
        finally:  # a router keeps no tensors on the GPU
            router.router_replay.experts = router.router_replay.chosen = router.row = None


def mixture(
    of_shared_expert: MLPSubmodules, *, router: type[Router] = Router, experts: type[GroupedExperts] = GroupedExperts
) -> ModuleSpec:
    """Return the specification of a layer's feed-forward part."""
    shared = ModuleSpec(module=SharedExpertMLP, submodules=of_shared_expert)
    submodules = MoESubmodules(router=router, experts=ModuleSpec(module=experts), shared_experts=shared)
    return ModuleSpec(module=Mixture, submodules=submodules)


def round_experts(stages: Iterable[torch.nn.Module], *, group: int) -> None:
    """Let the experts of a rank's stages compute with the weights that engines have in 4 bits (tensors/int4.py)."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, GroupedExperts):
                module.int4_group = group


def tallies(stages: Iterable[torch.nn.Module]) -> dict[int, RouterTally]:
    """Return what the routers of a rank's stages add up, by layer."""
    sparse = (layer for stage in stages for layer in stage.modules() if isinstance(layer, SparseLayer))
    return {layer.layer_number - 1: layer.mlp.router.tally for layer in sparse}


def biases(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the biases of the routers' choice by name: weights of the model that are not parameters."""
    return {name: buffer for name, buffer in network.named_buffers() if name.endswith(".expert_bias")}
