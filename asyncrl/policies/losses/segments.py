"""Reductions over the tokens of each sequence of a packed micro-batch, without loops.

The M tokens of S sequences are concatenated. ``sequence`` i64[M], non-decreasing, is the index 0..S-1 of each token's
sequence. A sequence may have no tokens, so S is passed and not inferred. Gradients flow through sums and means.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Array = torch.Tensor | NDArray[np.generic]
"""Input type of the formulas: a tensor, or a numpy array that is converted on entry."""


def as_floats(values: Array) -> torch.Tensor:
    """Return a float tensor of at least 32 bits; float64 stays float64, half and integers become float32."""
    tensor = torch.as_tensor(values)
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def segment_sum(values: Array, sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Return the sum over each sequence's tokens; 0 for a sequence without tokens.  f32[M], i64[M] -> f32[S]"""
    tensor = as_floats(values)
    zeros = torch.zeros(num_sequences, dtype=tensor.dtype, device=tensor.device)
    return zeros.index_add(0, torch.as_tensor(sequence), tensor)


def segment_count(sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Return the number of tokens of each sequence.  i64[M] -> i64[S]"""
    index = torch.as_tensor(sequence)
    return index.new_zeros(num_sequences).index_add(0, index, torch.ones_like(index))


def segment_mean(values: Array, sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Return the mean over each sequence's tokens; 0 for a sequence without tokens.  f32[M], i64[M] -> f32[S]"""
    total = segment_sum(values, sequence, num_sequences=num_sequences)
    return total / segment_count(sequence, num_sequences=num_sequences).clamp(min=1)


def segment_max(values: Array, sequence: Array, *, num_sequences: int) -> torch.Tensor:
    """Return the largest value of each sequence; -inf for a sequence without tokens.  f32[M], i64[M] -> f32[S]"""
    tensor = as_floats(values)
    lowest = torch.full((num_sequences,), -torch.inf, dtype=tensor.dtype, device=tensor.device)
    return lowest.scatter_reduce(0, torch.as_tensor(sequence), tensor, reduce="amax")


def spread(per_sequence: Array, sequence: Array) -> torch.Tensor:
    """Copy the value of each sequence to each of its tokens.  [S], i64[M] -> [M]"""
    return torch.as_tensor(per_sequence)[torch.as_tensor(sequence)]
