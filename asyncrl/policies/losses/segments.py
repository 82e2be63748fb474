"""Reductions over the tokens of each sequence of a packed micro-batch, without loops.

M tokens of S sequences lie end to end. ``sequence`` i64[M] is the index 0..S-1, non-decreasing, of the sequence that a
token belongs to; a sequence may have no tokens, so S is given and not guessed. Gradients flow through sums and means.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Array = torch.Tensor | NDArray[np.generic]
"""What the formulas take: a tensor, or a numpy array that becomes one at the edge."""


def as_floats(values: Array) -> torch.Tensor:
    """``values`` as a floating tensor of at least 32 bits; float64 stays float64, half and integers become float32."""
    tensor = torch.as_tensor(values)
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def segment_sum(values: Array, sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Sum over each sequence's tokens; 0 for one without.  f32[M], i64[M] -> f32[S]"""
    tensor = as_floats(values)
    zeros = torch.zeros(num_sequences, dtype=tensor.dtype, device=tensor.device)
    return zeros.index_add(0, torch.as_tensor(sequence), tensor)


def segment_count(sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Tokens of each sequence.  i64[M] -> i64[S]"""
    index = torch.as_tensor(sequence)
    return index.new_zeros(num_sequences).index_add(0, index, torch.ones_like(index))


def segment_mean(values: Array, sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Mean over each sequence's tokens; 0 for one without.  f32[M], i64[M] -> f32[S]"""
    total = segment_sum(values, sequence, num_sequences=num_sequences)
    return total / segment_count(sequence, num_sequences=num_sequences).clamp(min=1)


def segment_max(values: Array, sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Largest value of each sequence; -inf for one without tokens.  f32[M], i64[M] -> f32[S]"""
    tensor = as_floats(values)
    lowest = torch.full((num_sequences,), -torch.inf, dtype=tensor.dtype, device=tensor.device)
    return lowest.scatter_reduce(0, torch.as_tensor(sequence), tensor, reduce="amax")


def spread(per_sequence: Array, sequence: Array) -> torch.Tensor:
    """One value per sequence to each of its tokens.  [S], i64[M] -> [M]"""
    return torch.as_tensor(per_sequence)[torch.as_tensor(sequence)]
