"""Puts an indexer of ours into transformers' models with sparse attention (kernels/indexer.py), with the same weights.

transformers computes the scores of all queries, keys and heads at once: 17 GB for a sequence of 8,192 tokens. And its
GLM-5 ignores indexer_rope_interleave in some versions (5.12 rotates halves, later ones pairs); engines read it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.indexer import choose

_MODEL_TYPES: Final = ("deepseek_v32", "glm_moe_dsa")


def replace_indexers(model: Any) -> None:
    """Replace the indexers of a transformers model, if it is one that has them. Names of weights stay."""
    if model.config.model_type in _MODEL_TYPES:
        for layer in model.base_model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer = _Indexer(layer.self_attn.indexer)


class _Indexer(torch.nn.Module):
    """Called as transformers' indexer is, for whole sequences: without a cache or a mask."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm, self.weights_proj = theirs.wq_b, theirs.wk, theirs.k_norm, theirs.weights_proj
        self._size, self._most = theirs.config.index_head_dim, theirs.config.index_topk
        self._is_interleaved = bool(getattr(theirs.config, "indexer_rope_interleave", False))

    @torch.no_grad()
    def forward(
        self,
        hidden: torch.Tensor,
        of_queries: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        """Return i32[B, n, keys]: index_topk keys of each query, or all; of its own future if there are no others.

        hidden [B, n, H], of_queries [B, n, q_lora_rank], cosines and sines [1 or B, n, r], twice the same half each
        """
        assert mask is None
        assert past_key_values is None
        batch, length, _ = hidden.shape
        halves = (x[..., : x.shape[-1] // 2].expand(batch, -1, -1).flatten(0, 1) for x in position_embeddings)
        cosines, sines = halves

        def rotated(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(batch * length, -1, self._size)
            return fused.rotated(heads, cosines, sines, self._is_interleaved).view(batch, length, -1, self._size)

        queries, keys = rotated(self.wq_b(of_queries)), rotated(self.k_norm(self.wk(hidden)))[:, :, 0]
        weights = F.linear(hidden.float(), self.weights_proj.weight.float())
        most = min(self._most, length)
        chosen = choose(queries, weights, keys, most=most)
        every = torch.arange(most, dtype=torch.int32, device=hidden.device)
        return torch.cat([every.expand(batch, length - chosen.shape[1], most), chosen], dim=1)
