"""On a GPU, what tensors/exact_rows.py is on a CPU: SGLang's kernels in the learner's forward pass.

A server with --rl-on-policy-target fsdp computes as a transformers model in float32 under autocast to bfloat16: the
residual stream, norms and rotary embeddings in float32, products and attention in bfloat16, logits and logprobs rounded
to bfloat16. With --enable-deterministic-inference none of its kernels lets the batch choose the order of a sum. But its
triton backend attends by one kernel to what it reads at once (extend) and by another to a token that it has just
sampled (decode), which add in different orders. So does the learner: MicroBatch.is_decoded says which token had which.

With tensor parallelism a server adds, for the products that reduce over ranks, partial sums that are rounded already;
``divide_products`` makes the learner, on one GPU, do so too.

Written from SGLang 0.5.16 and 0.5.23.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch.nn import functional as F

from asyncrl.tensors.exact_environment import EXACT_ENVIRONMENT, TILE
from asyncrl.tensors.exact_rows import exactly

os.environ.update(EXACT_ENVIRONMENT)  # SGLang reads it when it is imported
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd  # noqa: E402
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified  # noqa: E402
from sglang.srt import batch_invariant_ops  # noqa: E402

_ATTENTION: Final = "asyncrl_sglang"
_LAUNCHED_TOKENS: Final = 4096
"""Tokens whose attention is computed at once. Each takes 4 bytes a number of its query, for every tile of its keys."""
_REDUCED: Final = ("o_proj", "down_proj")
"""Products that a tensor-parallel server cuts along the dimension that they sum over."""


@contextlib.contextmanager
def sglang_rows() -> Iterator[None]:
    batch_invariant_ops.enable_batch_invariant_mode(enable_bmm=False)  # its bmm would round angles to TF32
    try:
        with torch.autocast("cuda", torch.bfloat16):
            yield
    finally:
        batch_invariant_ops.disable_batch_invariant_mode()


def log_softmax(logits: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """logits [M, V], temperature one or [M, 1] -> f32[M, V], rounded as the server's sampler rounds."""
    with torch.autocast(logits.device.type, enabled=False):  # it would compute in float32
        if not isinstance(temperature, torch.Tensor):  # dividing by a plain number multiplies by its inverse
            temperature = torch.full((1, 1), temperature, device=logits.device)
        return torch.log_softmax(logits.bfloat16().div(temperature).bfloat16(), dim=-1).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Some decoded tokens of sequences [B, L], as the kernel takes them.

    tokens  i64[n]: their places among all B x L
    ends    i32[n + 1]: where the keys of each begin and end
    keys    i64[ends[-1]]: places of the keys that each sees: its sequence, up to itself
    tiles   i32[n]: into how many parts the server cuts the keys of each
    most    the most of them
    """

    tokens: torch.Tensor
    ends: torch.Tensor
    keys: torch.Tensor
    tiles: torch.Tensor
    most: int


def decoded_tokens(is_decoded: torch.Tensor) -> list[Decoded]:
    """is_decoded  bool[B, L]"""
    found, length = is_decoded.flatten().nonzero()[:, 0], is_decoded.shape[1]
    starts = range(0, len(found), _LAUNCHED_TOKENS)
    return [_decoded(found[start : start + _LAUNCHED_TOKENS], length) for start in starts]


def _decoded(tokens: torch.Tensor, length: int) -> Decoded:
    columns = tokens % length
    counts = columns + 1
    ends = F.pad(counts.cumsum(0), (1, 0))
    offsets = torch.repeat_interleave(tokens - columns - ends[:-1], counts)
    return Decoded(
        tokens=tokens,
        ends=ends.int(),
        keys=torch.arange(len(offsets), device=tokens.device) + offsets,
        tiles=((counts + TILE - 1) // TILE).int(),
        most=-(-length // TILE),
    )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    decoded: Sequence[Decoded],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of ``query`` [B, heads, L, size] over [B, fewer heads, L, size], in bfloat16."""

    def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return found.transpose(1, 2)

    def served(_function: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        sequences, heads, length, size = query.shape
        queries, keys, values = (
            one.transpose(1, 2).reshape(sequences * length, -1, size) for one in (query, key, value)
        )
        result = torch.empty_like(queries)
        _read(queries, keys, values, result, length=length, scaling=scaling)
        for part in decoded:
            result[part.tokens] = _decode(queries[part.tokens], keys, values, part, scaling=scaling)
        return result.view(sequences, length, heads, size)

    return exactly(served, whole, query.bfloat16(), key.bfloat16(), value.bfloat16()), None


def _read(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    result: torch.Tensor,
    *,
    length: int,
    scaling: float,
) -> None:
    """Write to ``result`` what tokens attend to that a server reads at once. All are [B x L, heads, size]."""
    places = torch.arange(len(queries), device=queries.device)
    ends = torch.arange(0, len(queries) + 1, length, device=queries.device, dtype=torch.int32)
    extend_attention_fwd_unified(
        queries,
        result,
        keys,
        values,
        k_scale=1.0,
        v_scale=1.0,
        qo_indptr=ends,
        kv_indptr=ends,
        kv_indices=places,
        prefix_lens=torch.zeros_like(ends[1:]),
        max_len_extend=length,
        sm_scale=scaling,
    )


def _decode(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Decoded, *, scaling: float
) -> torch.Tensor:
    """Return what the queries [n, heads, size] of decoded tokens attend to. Keys, values: [B x L, heads, size]."""
    result = torch.empty_like(queries)
    sums = torch.empty(*queries.shape[:2], part.most, queries.shape[2], device=queries.device)
    decode_attention_fwd(
        queries,
        keys,
        values,
        result,
        part.ends,
        part.keys,
        sums,
        torch.empty(sums.shape[:3], device=queries.device),
        part.tiles,
        part.most,
        sm_scale=scaling,
        k_scale=1.0,
        v_scale=1.0,
    )
    return result


def use_attention(model: Any) -> None:
    """Let a loaded model attend by ``attention``."""
    transformers.AttentionInterface.register(_ATTENTION, attention)
    model.set_attn_implementation(_ATTENTION)


class _Divided(torch.nn.Linear):
    """A product whose partial sums are rounded before they are added."""

    def __init__(self, whole: torch.nn.Linear, parts: int) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=whole.bias is not None, device="meta")
        self.weight, self.bias, self._parts = whole.weight, whole.bias, parts

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        inputs, weights = input.chunk(self._parts, -1), self.weight.chunk(self._parts, 1)
        total = F.linear(inputs[0], weights[0], self.bias)  # rank 0 adds the bias
        for one, weight in zip(inputs[1:], weights[1:], strict=True):
            total = total + F.linear(one, weight)
        return total


def divide_products(model: torch.nn.Module, parts: int) -> None:
    """Let a loaded model compute as a server on ``parts`` GPUs does: 1 or 2, because a sum of two has one order."""
    if parts == 1:
        return
    for module in list(model.modules()):
        for name in _REDUCED:
            whole = getattr(module, name, None)
            if isinstance(whole, torch.nn.Linear):
                setattr(module, name, _Divided(whole, parts))
