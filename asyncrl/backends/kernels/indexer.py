"""The lightning indexer of DeepSeek Sparse Attention chooses the keys that a query sees (arXiv:2512.02556, eq. 1, 2).

The score of key s for query t is the sum over the indexer's heads h of w[t, h] relu(q[t, h] . k[s]); the keys with the
highest scores are chosen, the same for all heads of attention. Positive factors of all scores, and the Hadamard
rotation of both q and k, change no choice and are left out: engines need them for FP8. The choice has no gradient.
Tests: tests/unit/backends/megatron/test_sparse_attention.py.
"""

from __future__ import annotations

from typing import Final

import torch

NORM_EPS: Final = 1e-6
"""Of the LayerNorm of keys, whatever rms_norm_eps is."""
_NUMBERS: Final = 2**26
"""Products of heads that are computed at once: 256 MiB in float32."""


@torch.no_grad()
def choose(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, most: int) -> torch.Tensor:
    """Return i32[B, c, most], in no order: the keys of the last c queries, those that could see more than ``most``.

    queries  [B, n, heads, d], rotated; the last one is at the last key
    weights  f32[B, n, heads]
    keys     [B, m, d], normalised and rotated; m >= n
    """
    batch, num_queries, heads, _ = queries.shape
    num_keys = keys.shape[1]
    earlier = num_keys - num_queries
    first = min(num_queries, max(0, most - earlier))
    chosen = torch.empty(batch, num_queries - first, most, dtype=torch.int32, device=queries.device)
    step = max(1, _NUMBERS // (batch * heads * num_keys))
    for start in range(first, num_queries, step):
        stop = min(num_queries, start + step)
        products = _products(queries[:, start:stop].flatten(1, 2), keys[:, : earlier + stop])
        products = products.relu_().view(batch, stop - start, heads, -1)
        scores = (weights[:, start:stop, None] @ products)[:, :, 0]
        positions = torch.arange(earlier + stop, device=queries.device)
        scores = scores.masked_fill_(positions > positions[earlier + start :, None], -torch.inf)
        chosen[:, start - first : stop - first] = scores.topk(most, sorted=False).indices
    return chosen


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[B, r, d] x [B, m, d] -> f32[B, r, m], never rounded to 16 bits."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right.transpose(1, 2), out_dtype=torch.float32)
    return left.float() @ right.float().transpose(1, 2)
