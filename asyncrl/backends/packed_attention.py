"""Causal attention inside each document of a packed row, as a core attention for Megatron's local layer spec.

Megatron's own materialises N x N scores and knows no documents. On CUDA in 16 bits this is torch's variable-length
FlashAttention; elsewhere scaled_dot_product_attention over a few rectangles of documents (micro_batches.Rectangles).
Nothing here asks the device a question, so layers follow each other without a host synchronisation.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.backends.micro_batches import Rectangles, rectangles
from asyncrl.policies.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDocuments:
    """Where the documents of one packed row are, on the device.

    boundaries  i32[D+1], max_length of the longest document; layout when rectangles are used
    """

    boundaries: torch.Tensor
    max_length: int
    layout: Rectangles | None

    @classmethod
    def of(cls, micro_batch: MicroBatch, *, device: torch.device, dtype: torch.dtype) -> PackedDocuments:
        boundaries = torch.from_numpy(micro_batch.boundaries.astype("int32")).to(device)
        longest = int((micro_batch.boundaries[1:] - micro_batch.boundaries[:-1]).max())
        layout = None
        if not uses_varlen(device, dtype):
            cpu = rectangles(micro_batch.boundaries)
            layout = Rectangles(indices=tuple(i.to(device) for i in cpu.indices), order=cpu.order.to(device))
        return cls(boundaries=boundaries, max_length=longest, layout=layout)


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """FlashAttention takes 16-bit numbers on CUDA only."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


class PackedAttention(torch.nn.Module):
    """Built and called by Megatron's SelfAttention; reads ``packed_seq_params.documents``."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_unused: Any
    ) -> None:
        super().__init__()
        self._scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: Any,
        **_unused: Any,
    ) -> torch.Tensor:
        """query [N, 1, heads, d], key and value [N, 1, key-value heads, d] -> [N, 1, heads x d]."""
        documents: PackedDocuments = packed_seq_params.documents
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        if documents.layout is None:
            attended = _varlen(query, key, value, documents, self._scale)
        else:
            attended = _rectangular(query, key, value, documents.layout, self._scale)
        return attended.reshape(query.shape[0], 1, -1)


def _rectangular(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Rectangles, scale: float
) -> torch.Tensor:
    """[N, heads, d] x 3 -> [N, heads, d]"""
    attended = []
    for indices in layout.indices:
        q, k, v = (x[indices].transpose(1, 2) for x in (query, key, value))
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
        attended.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)[layout.order]


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: PackedDocuments, scale: float
) -> torch.Tensor:
    """[N, heads, d] x 3 -> [N, heads, d]. torch 2.10 has is_causal, 2.11 window_size and scale, 2.12 enable_gqa."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "scale" in known:
        options["scale"] = scale
    else:
        query = query * (scale * math.sqrt(query.shape[-1]))
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    where, longest = documents.boundaries, documents.max_length
    attended: Any = varlen_attn(
        query.contiguous(), key.contiguous(), value.contiguous(), where, where, longest, longest, **options
    )
    return attended  # type: ignore[no-any-return]
