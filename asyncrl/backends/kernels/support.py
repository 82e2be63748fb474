"""Logits without the tokens that a token could not be sampled as, because top_p or top_k left them out."""

from __future__ import annotations

from typing import Final

import torch

_OUT: Final = -1e9
"""Logit of a token outside the support: its probability is exactly 0. Not -inf, because 0 x -inf is NaN in the entropy,
and a tensor-parallel rank may have no token of a row's support."""


def exclude(
    logits: torch.Tensor, numbers: torch.Tensor, tokens: torch.Tensor, *, first_row: int = 0, first_token: int = 0
) -> torch.Tensor:
    """logits [M, V] -> the same, with _OUT outside the support. Rows without any token in ``numbers`` stay.

    numbers, tokens         i64[K]: token tokens[k] is in the support of row numbers[k]
    first_row, first_token  the row and the token of logits[0, 0], if these are a part of all rows and tokens

    In place if the logits need no gradient. Nothing here waits for the device: pairs of other parts go to a place
    behind the last row.
    """
    num_rows, width = logits.shape
    rows, columns = numbers - first_row, tokens - first_token
    is_here = (rows >= 0) & (rows < num_rows)
    of_row = torch.where(is_here, rows, num_rows)
    is_cut = torch.zeros(num_rows + 1, dtype=torch.bool, device=logits.device).index_fill_(0, of_row, True)[:-1]
    is_here &= (columns >= 0) & (columns < width)
    places = torch.where(is_here, rows * width + columns, num_rows * width)
    is_in = torch.zeros(num_rows * width + 1, dtype=torch.bool, device=logits.device).index_fill_(0, places, True)
    is_out = is_in[:-1].view(num_rows, width).logical_not_().logical_and_(is_cut[:, None])
    return logits.masked_fill(is_out, _OUT) if logits.requires_grad else logits.masked_fill_(is_out, _OUT)
