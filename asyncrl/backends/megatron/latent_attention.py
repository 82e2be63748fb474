"""Multi-head latent attention on packed rows with Megatron's linear layers.

Megatron's own latent attention needs Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.backends.families.shape import Indexer, LatentAttention
from asyncrl.backends.kernels import fused, indexer
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import ColumnLinear, RowLinear, WholeLinear
from asyncrl.backends.megatron.layers import Norm, RowParameters
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.packed_attention import attention
from asyncrl.backends.megatron.sparse_attention import Choice, choose_keys, sparse_attention

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule


class KeyIndexer(torch.nn.Module):
    """Chooses the keys of each query, with weights under their names in transformers. All ranks choose the same.

    Megatron's own indexer takes no packed rows in 0.16, and rotates the last numbers of a head instead of the first. In
    0.19 it computes the scores of a whole row at once, unless TileLang's or cuDNN's kernels are installed.
    """

    def __init__(self, config: TransformerConfig, query_rank: int, shape: Indexer) -> None:
        super().__init__()
        self._shape, self._is_sequence_parallel = shape, config.sequence_parallel
        width, dtype = config.hidden_size, config.params_dtype
        self.wq_b = torch.nn.Linear(query_rank, shape.num_heads * shape.size, bias=False, dtype=dtype)
        self.wk = torch.nn.Linear(width, shape.size, bias=False, dtype=dtype)
        self.k_norm = torch.nn.LayerNorm(shape.size, eps=indexer.NORM_EPS, dtype=dtype)
        self.weights_proj = torch.nn.Linear(width, shape.num_heads, bias=False, dtype=dtype)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, low: torch.Tensor, parameters: RowParameters) -> Choice:
        """hidden [n, 1, H] and the latent of queries, low [n, 1, query_rank], of a tensor-parallel rank"""
        assert parameters.row is not None
        assert parameters.rotary is not None
        made = self.wq_b(low), self.k_norm(self.wk(hidden)), F.linear(hidden.float(), self.weights_proj.weight.float())
        if self._is_sequence_parallel:
            made = tuple(gather_from_sequence_parallel_region(one) for one in made)
        queries, keys, weights = (one.flatten(0, 1) for one in made)
        queries, keys = queries.view(len(queries), -1, self._shape.size), keys[:, None]
        queries, keys = (fused.rotated(x, *parameters.rotary, self._shape.is_interleaved) for x in (queries, keys))
        return choose_keys(queries, weights, keys[:, 0], parameters.row.attention, most=self._shape.chosen)


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
        if latent.indexer:
            self._source = latent.indexer.source(layer_number - 1)
            if self._source == layer_number - 1:
                self.indexer = KeyIndexer(config, latent.query_rank, latent.indexer)
            self._is_source = layer_number < config.num_layers and latent.indexer.source(layer_number) == self._source

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
        of_queries = self.query_norm(self.query_down(hidden)) if latent.query_rank else hidden
        queries, _bias = self.query_up(of_queries)
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
        how = packed_seq_params.row.attention
        if latent.indexer and packed_seq_params.row.longest > latent.indexer.chosen:
            choice = self._choice(hidden, of_queries, packed_seq_params)
            attended = sparse_attention(query, key, value, choice, how)
        else:
            attended = attention(query, key, value, how)
        return self.linear_proj(attended[..., : latent.value_size].flatten(1)[:, None])

    def _choice(self, hidden: torch.Tensor, of_queries: torch.Tensor, parameters: RowParameters) -> Choice:
        """Return the keys that this layer's indexer chooses, or that of a layer before it has chosen."""
        choice = parameters.choices.get(self._source)
        if choice is None:
            choice = self.indexer(hidden, of_queries, parameters)
            if self._is_source:
                parameters.choices[self._source] = choice
        return choice

    def _split(self, mixed: torch.Tensor) -> torch.Tensor:
        """[N, 1, heads x d] -> [N, heads, d]"""
        return mixed.view(len(mixed), self._heads, -1)
