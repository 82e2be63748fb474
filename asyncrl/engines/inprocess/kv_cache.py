"""KV cache of a batch whose rows can be added and removed between tokens.

Row r of every layer holds one sequence from column 0 on; the rows in use are always 0..n-1. There is no left padding,
so a token's column is its position. Columns beyond the length of a row are masked, and overwritten later.

The cache plugs into a Hugging Face model in two places. Attention layers pass keys and values to ``update``, as with
any cache. They pass the result to ``attention``, which is registered under the name ``ATTENTION``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

ATTENTION = "asyncrl"


class KVCache:
    """Keys and values of every layer, each [rows, columns, heads, head size]. Capacity grows by doubling."""

    def __init__(self) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows = self._columns = 0
        self._prompts: torch.Tensor | None = None
        self._first_row = 0
        self._cells: torch.Tensor | None = None
        self._num_columns_read = 0

    def reserve(self, *, rows: int, columns: int) -> None:
        """Grow to ``rows`` sequences of ``columns`` tokens, keeping the contents."""
        old_rows, old_columns = self._rows, self._columns
        if rows <= old_rows and columns <= old_columns:
            return
        self._rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows)
        self._columns = old_columns if columns <= old_columns else max(columns, 2 * old_columns)
        for n, pair in enumerate(self._layers):
            keys, values = (self._empty(old.shape[2], old.shape[3], like=old) for old in pair)
            for new, old in zip((keys, values), pair, strict=True):
                new[:old_rows, :old_columns] = old
            self._layers[n] = (keys, values)

    def expect_prompts(self, prompts: torch.Tensor, *, first_row: int) -> None:
        """Prepare for a prefill pass: row ``first_row`` + i receives sequence ``prompts[i]`` of the pass."""
        self._prompts = prompts
        self._first_row = first_row

    def expect_tokens(self, lengths: torch.Tensor, *, longest: int) -> None:
        """Prepare for a pass that decodes one token for each of rows 0..n-1, which hold ``lengths`` tokens so far."""
        self._prompts = None
        self._cells = lengths + torch.arange(len(lengths), device=lengths.device) * self._columns
        self._num_columns_read = longest + 1

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the sequence in row ``source`` to row ``target``."""
        for pair in self._layers:
            for stored in pair:
                stored[target, :length] = stored[source, :length]

    def scrub(self, row: int) -> None:
        """Zero a row that holds NaN: masked columns contribute 0 x value, and 0 x NaN is NaN."""
        for pair in self._layers:
            for stored in pair:
                stored[row].zero_()

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [n, heads, tokens, head size]. Returns the keys and values to attend to."""
        n, heads, num_tokens, _size = keys.shape
        if layer == len(self._layers):
            sizes = keys.shape[3], values.shape[3]  # they differ in latent attention
            self._layers.append((self._empty(heads, sizes[0], like=keys), self._empty(heads, sizes[1], like=values)))
        pair = self._layers[layer]
        if self._prompts is not None:
            rows = slice(self._first_row, self._first_row + len(self._prompts))
            for stored, new in zip(pair, (keys, values), strict=True):
                stored[rows, :num_tokens] = new.transpose(1, 2)[self._prompts]
            return keys, values
        assert self._cells is not None, "call expect_prompts or expect_tokens before every pass"
        for stored, new in zip(pair, (keys, values), strict=True):
            flat = new.reshape(n, -1)
            stored.view(-1, flat.shape[1]).index_copy_(0, self._cells, flat)
        stored_keys, stored_values = (stored[:n, : self._num_columns_read].transpose(1, 2) for stored in pair)
        return stored_keys, stored_values

    def _empty(self, heads: int, size: int, *, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not uninitialised memory, for the reason in ``scrub``.
        return like.new_zeros(self._rows, self._columns, heads, size)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` [n, heads, tokens, size] over ``key`` and ``value`` [n, fewer heads, columns, size].

    One-token passes fold the query heads that share a key head into the token axis, so that keys are never repeated.

    s_aux  attention sinks of gpt-oss [heads]: scores without a value
    """
    n, heads, num_tokens, size = query.shape
    groups = key.shape[1]
    if num_tokens == 1:
        folded = query.view(n, groups, heads // groups, size)
        mask = attention_mask.expand(n, groups, heads // groups, key.shape[2])
        if s_aux is not None:
            key, value, mask = _with_sinks(key, value, mask, s_aux.view(groups, -1, 1))
        result = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return result.reshape(n, 1, heads, value.shape[-1]), None
    key = key.repeat_interleave(heads // groups, dim=1)
    value = value.repeat_interleave(heads // groups, dim=1)
    if s_aux is not None:
        mask = attention_mask.expand(n, heads, num_tokens, key.shape[2])
        key, value, attention_mask = _with_sinks(key, value, mask, s_aux.view(heads, 1, 1))
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return result.transpose(1, 2), None


def _with_sinks(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append a key and a value of zeros, and add a sink to every query's score of that key.

    mask: bool[n, heads, tokens, columns].  sinks: broadcast to [heads, tokens, 1]
    """
    scores = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, -torch.inf)
    column = sinks.to(key.dtype).expand(*mask.shape[:-1], 1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), torch.cat([scores, column], dim=-1)
