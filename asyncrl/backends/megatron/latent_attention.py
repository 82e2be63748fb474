"""Multi-head latent attention on packed rows with Megatron's linear layers.

Megatron's own latent attention needs Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.backends.families.shape import Indexer, LatentAttention
from asyncrl.backends.kernels import fused
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import ColumnLinear, RowLinear, WholeLinear
from asyncrl.backends.megatron.layers import Norm, RowParameters
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.packed_attention import attention

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule


class IndexerWeights(torch.nn.Module):
    """The weights of an indexer under their names in transformers. Nothing computes with them (Indexer)."""

    def __init__(self, config: TransformerConfig, query_rank: int, indexer: Indexer) -> None:
        super().__init__()
        width, dtype = config.hidden_size, config.params_dtype
        self.wq_b = torch.nn.Linear(query_rank, indexer.num_heads * indexer.size, bias=False, dtype=dtype)
        self.wk = torch.nn.Linear(width, indexer.size, bias=False, dtype=dtype)
        self.k_norm = torch.nn.LayerNorm(indexer.size, dtype=dtype)
        self.weights_proj = torch.nn.Linear(width, indexer.num_heads, bias=False, dtype=dtype)


class PackedLatentAttention(MegatronModule):  # type: ignore[misc]
    """Splits the heads over ranks. Every rank computes the latents that all heads share."""

    def __init__(
        self, config: TransformerConfig, *_: Any, layer_number: int, latent: LatentAttention, **__: Any
    ) -> None:
        """layer_number: from 1, in the whole model"""
        super().__init__(config=config)
        self._latent = latent
        heads, width = config.num_attention_heads, config.hidden_size
        self._heads = heads // config.tensor_model_parallel_size
        size = latent.plain_size + latent.rotary_size
        if latent.query_rank:
            self.query_down = self._whole(width, latent.query_rank)
            self.query_norm = Norm(config=config, hidden_size=latent.query_rank, eps=config.layernorm_epsilon)
        self.query_up = self._by_heads(latent.query_rank or width, heads * size)
        self.key_value_down = self._whole(width, latent.key_value_rank + latent.rotary_size)
        self.key_value_norm = Norm(config=config, hidden_size=latent.key_value_rank, eps=config.layernorm_epsilon)
        self.key_value_up = self._by_heads(latent.key_value_rank, heads * (latent.plain_size + latent.value_size))
        self.linear_proj = RowLinear(
            heads * latent.value_size,
            width,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        if latent.indexer and layer_number - 1 in latent.indexer.layers:
            self.indexer = IndexerWeights(config, latent.query_rank, latent.indexer)

    def _whole(self, inputs: int, outputs: int) -> WholeLinear:
        config = self.config
        return WholeLinear(inputs, outputs, dtype=config.params_dtype, is_sequence_parallel=config.sequence_parallel)

    def _by_heads(self, inputs: int, outputs: int) -> Any:
        init, config = self.config.init_method, self.config
        return ColumnLinear(
            inputs, outputs, config=config, init_method=init, bias=False, gather_output=False, skip_bias_add=True
        )

    def forward(self, hidden: torch.Tensor, *_: Any, packed_seq_params: RowParameters, **__: Any) -> Any:
        assert packed_seq_params.row is not None
        assert packed_seq_params.rotary is not None
        latent = self._latent
        low = self.query_norm(self.query_down(hidden)) if latent.query_rank else hidden
        queries, _bias = self.query_up(low)
        low, shared_key = self.key_value_down(hidden).split([latent.key_value_rank, latent.rotary_size], dim=-1)
        if self.config.sequence_parallel:  # the heads of every rank use it, so its gradients are summed
            shared_key = gather_from_sequence_parallel_region(shared_key)
        keys_and_values, _bias = self.key_value_up(self.key_value_norm(low))
        query, key, value = fused.latent_heads(
            self._split(queries),
            self._split(keys_and_values),
            shared_key.flatten(0, 1)[:, None],
            *packed_seq_params.rotary,
            latent.plain_size,
            self.config.rotary_interleaved,
            latent.score_scale,
        )
        attended = attention(query, key, value, packed_seq_params.row.attention)[..., : latent.value_size]
        return self.linear_proj(attended.flatten(1)[:, None])

    def _split(self, mixed: torch.Tensor) -> torch.Tensor:
        """[N, 1, heads x d] -> [N, heads, d]"""
        return mixed.view(len(mixed), self._heads, -1)
