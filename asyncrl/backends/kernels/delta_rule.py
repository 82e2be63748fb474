"""Gated delta rule (arXiv:2412.06464) and short convolution, within the sequences of a packed row.

A head's state S, [key size, value size], is zero before each sequence. A token with a unit query q, unit key k, value
v, decay exp(g) and step b changes it and reads it:

    S <- exp(g) S,  S <- S + k (b (v - S^T k))^T,  output = S^T q / sqrt(key size)

A loop over tokens would be slow, so sequences are cut into chunks of 64 tokens. What the tokens of a chunk write
follows from one triangular system for each chunk and head, given the state before the chunk. All systems are solved at
once. Only the states need a loop, over the chunks of the longest sequence, with one step for all sequences.

On CUDA in 16 bits, flash-linear-attention does all of this if it is installed, and computes the same in a first try:
it refuses the gradient with some versions of Triton on some GPUs. Computation is in float32.
Tests: tests/unit/backends/kernels/test_delta_rule.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from asyncrl.backends.kernels import flash_linear_attention
from asyncrl.backends.kernels.fused import fused
from asyncrl.backends.kernels.trial import find_problem, with_gradients
from asyncrl.backends.micro_batches import to_device

CHUNK: Final = 64
_TRIED: Final = np.array([0, 70, 71, 200], np.int32)
"""Boundaries of the sequences on which kernels are compared with plain torch."""

log = logging.getLogger("asyncrl.kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The sequences of a packed row of N tokens, in chunks.

    The first chunks of all sequences come first, then the second ones, and so on. Within each of these runs, chunks of
    longer sequences come first. So a run continues the first sequences of the run before it. Padding repeats the last
    token of a sequence. It cannot change an output that is read, because nothing follows it.

    indices     i64[chunks, 64]: tokens of the row
    order       i64[N]: position of each token in the flattened chunks
    runs        number of chunks of each run
    positions   i64[N]: position of each token in its sequence
    boundaries  i64[D + 1], on the device, and on the host
    has_kernels  False: plain torch, whatever is installed (learner.options.linear_attention)
    """

    indices: torch.Tensor
    order: torch.Tensor
    runs: Sequence[int]
    positions: torch.Tensor
    boundaries: torch.Tensor
    host_boundaries: torch.Tensor
    has_kernels: bool = True

    @classmethod
    def from_boundaries(
        cls, boundaries: NDArray[np.int32], device: torch.device, *, has_kernels: bool = True
    ) -> Chunks:
        """boundaries: i32[D + 1]"""
        # Example: sequences of 70, 1 and 129 tokens. Longest first: 129, 70, 1, with 3, 2 and 1 chunks of 64. The runs
        # are [3, 2, 1] chunks: the first chunks of all three, the second ones of two, the third one of the longest.
        ends = boundaries.astype(np.int64)
        lengths = np.diff(ends)
        longest_first = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[longest_first] // CHUNK)
        runs = [int((counts > number).sum()) for number in range(counts[0])]
        first = np.concatenate([ends[longest_first[:run]] + CHUNK * number for number, run in enumerate(runs)])
        after = np.concatenate([ends[longest_first[:run] + 1] for run in runs])
        indices = first[:, None] + np.arange(CHUNK)
        is_token = indices < after[:, None]
        order = np.empty(ends[-1], np.int64)
        order[indices[is_token]] = np.flatnonzero(is_token)
        moved = to_device(
            {
                "indices": np.minimum(indices, after[:, None] - 1),
                "order": order,
                "positions": np.arange(ends[-1]) - np.repeat(ends[:-1], lengths),
                "boundaries": ends,
            },
            device,
        )
        return cls(runs=runs, host_boundaries=torch.from_numpy(ends), has_kernels=has_kernels, **moved)

    @property
    def ends(self) -> dict[str, torch.Tensor]:
        """The boundaries as arguments of flash_linear_attention."""
        return {"boundaries": self.boundaries, "host_boundaries": self.host_boundaries}


def short_convolution(x: torch.Tensor, kernels: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Return silu of sum over j of kernels[:, 0, -1 - j] x x[t - j], with zeros before a sequence.

    x [N, channels], kernels [channels, 1, width] -> [N, channels]
    """
    if (
        chunks.has_kernels
        and _may_have_kernels(x)
        and convolution_agrees(x.device, x.dtype, kernels.shape[0], kernels.shape[-1])
    ):
        return flash_linear_attention.short_convolution(x, kernels, **chunks.ends)
    return _convolve(x, kernels, chunks)


def _convolve(x: torch.Tensor, kernels: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    wide, kernels = x.float(), kernels.float()
    total = wide * kernels[:, 0, -1]
    for back in range(1, kernels.shape[-1]):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(x)]
        total = total + (chunks.positions >= back)[:, None] * earlier * kernels[:, 0, -1 - back]
    return F.silu(total).to(x.dtype)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    step: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Return what each token reads from the state, [N, value heads, value size].

    query, key  [N, key heads, key size], not yet unit vectors; each serves value heads / key heads neighbours
    value       [N, value heads, value size]
    log_decay   f32[N, value heads]: g, not above 0
    step        f32[N, value heads]: b
    """
    rows = (query, key, value, log_decay, step)
    may_have = chunks.has_kernels and _may_have_kernels(value)
    if may_have and rule_agrees(value.device, value.dtype, key.shape[1:], value.shape[1:]):
        return flash_linear_attention.gated_delta_rule(*rows, **chunks.ends)
    return _read_in_chunks(rows, chunks)


def _read_in_chunks(rows: Sequence[torch.Tensor], chunks: Chunks) -> torch.Tensor:
    query, key, value, log_decay, step = rows
    per_key = value.shape[1] // key.shape[1]
    read = _scan_chunks(
        _split_in_chunks(_normalize(query) * query.shape[-1] ** -0.5, 1, chunks),
        _split_in_chunks(_normalize(key), 1, chunks),
        _split_in_chunks(value.float(), per_key, chunks),
        _split_in_chunks(log_decay, per_key, chunks),
        _split_in_chunks(step, per_key, chunks),
        chunks.runs,
    )
    by_token = read.flatten(1, 2).transpose(1, 2).flatten(0, 1)  # [chunks x 64, value heads, value size]
    return by_token[chunks.order].to(value.dtype)


def _may_have_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and flash_linear_attention.is_installed()


@functools.cache
def convolution_agrees(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Return whether the package's convolution computes what plain torch does. Logs once if not."""
    chunks = Chunks.from_boundaries(_TRIED, device)
    return _agrees(
        "the convolution",
        lambda x, weights: flash_linear_attention.short_convolution(x, weights, **chunks.ends),
        lambda x, weights: _convolve(x, weights, chunks),
        _random([(int(_TRIED[-1]), channels), (channels, 1, width)], device, dtype),
    )


@functools.cache
def rule_agrees(device: torch.device, dtype: torch.dtype, grad_key: torch.Size, grad_value: torch.Size) -> bool:
    """Return whether the package's delta rule computes what plain torch does. Logs once if not.

    grad_key, grad_value: (heads, size)
    """
    chunks, tokens = Chunks.from_boundaries(_TRIED, device), int(_TRIED[-1])
    heads = _random([(tokens, *grad_key), (tokens, *grad_key), (tokens, *grad_value)], device, dtype)
    decay, step = _random([(tokens, grad_value[0])] * 2, device, torch.float32)
    return _agrees(
        "the delta rule",
        lambda *rows: flash_linear_attention.gated_delta_rule(*rows, **chunks.ends),
        lambda *rows: _read_in_chunks(rows, chunks),
        [*heads, -decay.square(), step.sigmoid()],
    )


def _random(shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator(device).manual_seed(0)
    return [torch.randn(*shape, device=device, dtype=dtype, generator=random) for shape in shapes]


def _agrees(
    part: str,
    kernels: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> bool:
    """Compare outputs and gradients, up to the rounding of 8 bits in a sum of products. Logs why they differ."""

    def agrees() -> bool:
        pairs = zip(with_gradients(plain, inputs), with_gradients(kernels, inputs), strict=True)
        return all((b - a).float().norm() < 0.05 * a.float().norm() for a, b in pairs)

    if problem := find_problem(agrees):
        log.warning("%s runs in plain torch, without the kernels of flash-linear-attention: %s", part, problem)
    return not problem


def _normalize(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _split_in_chunks(x: torch.Tensor, per_key: int, chunks: Chunks) -> torch.Tensor:
    """[N, key heads x per_key, ...] -> [chunks, key heads, per_key, 64, ...]"""
    by_chunk = x[chunks.indices]
    return by_chunk.view(*by_chunk.shape[:2], -1, per_key, *x.shape[2:]).movedim(1, 3)


def _scan_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    step: torch.Tensor,
    runs: Sequence[int],
) -> torch.Tensor:
    """query and key [chunks, key heads, 1, 64, k], value [chunks, key heads, values per key, 64, v], the others without
    v -> [chunks, key heads, values per key, 64, v]"""
    since_start = log_decay.cumsum(-1)  # of the chunk
    is_earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    between = since_start[..., :, None] - since_start[..., None, :]
    decay = between.masked_fill(~is_earlier, -torch.inf).exp()  # a later token's exponent could overflow
    step, fade = step[..., None], since_start.exp()[..., None]
    # Writes w: w_t = b_t (v_t - fade_t S^T k_t - sum over j < t of decay_tj (k_t . k_j) w_j), S before the chunk
    system = step * (key @ key.mT) * decay
    known = torch.cat([step * value, step * fade * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)  # ignores the diagonal
    written, erased = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    seen, faded_query = (query @ key.mT) * decay, query * fade
    left, kept = key * decay[..., -1, :, None], fade[..., -1:, :]  # at the end of the chunk
    state = key.new_zeros(runs[0], *value.shape[1:3], key.shape[-1], value.shape[-1])
    outputs, begin = [], 0
    for run in runs:
        now, state = slice(begin, begin + run), state[:run]
        writes = written[now] - erased[now] @ state
        outputs.append(faded_query[now] @ state + seen[now] @ writes)
        state = kept[now] * state + left[now].mT @ writes
        begin += run
    return torch.cat(outputs)


@fused
def log_decays(rates: torch.Tensor, log_rates: torch.Tensor, rate_bias: torch.Tensor) -> torch.Tensor:
    """rates [N, heads], log_rates and rate_bias [heads] -> f32[N, heads]: -exp(log_rates) x softplus(rates + bias)"""
    return -log_rates.float().exp() * F.softplus(rates.float() + rate_bias.float())


@fused
def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head times silu(gate).  x and gate [N, heads, size], weight [size] -> [N, 1, heads x size]"""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * F.silu(gate.float())).to(x.dtype).flatten(1)[:, None]
