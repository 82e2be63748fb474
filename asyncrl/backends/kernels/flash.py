"""FlashAttention over the sequences of a packed row, on CUDA in 16 bits.

The kernels are those of the package flash-attn-4 where it is installed and agrees with torch, and torch's otherwise:
within a window, and for heads that the package does not support. The first call compiles kernels for some ten seconds
and waits for the device; later ones never do.
Tests: tests/unit/backends/kernels/test_flash.py, test_on_gpu.py.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncrl.backends.kernels.trial import find_problem, with_gradients
from asyncrl.errors import BackendError

_PACKAGE: Final = "flash-attn-4"

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Queries and the keys that they see, run by run: run r is [boundaries[r], boundaries[r + 1]) of either.

    query_boundaries, key_boundaries  i32[runs + 1]; a run's last query is at its last key
    longest_query, longest_key        tokens of the longest run
    """

    query_boundaries: torch.Tensor
    key_boundaries: torch.Tensor
    longest_query: int
    longest_key: int


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs, *, window: int = 0
) -> torch.Tensor:
    """query [n, heads, d], key and value [k, key-value heads, d] -> [n, heads, d]: causal within each run.

    window: most tokens that a query sees, itself and those before it; 0 for all before it

    Scores are scaled by 1 / sqrt(d).
    """
    repeats = query.shape[1] // key.shape[1]
    if not window and _has_newer(query.dtype, query.shape[-1], repeats):
        return _newer(query, key, value, runs)
    if repeats > 1 and not takes_fewer_key_heads(query.dtype):
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return _of_torch(query, key, value, runs, window)


def both_ways(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, boundaries: torch.Tensor, longest: int
) -> torch.Tensor:
    """query, key and value [n, heads, d] -> [n, heads, d]: within each run, every token sees every other.

    boundaries  i32[runs + 1];  longest: tokens of the longest run.  Scores are scaled by 1 / sqrt(d).
    """
    from torch.nn.attention.varlen import varlen_attn

    attended: Any = varlen_attn(
        query.contiguous(), key.contiguous(), value.contiguous(), boundaries, boundaries, longest, longest
    )
    return attended  # type: ignore[no-any-return]


def _of_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs, window: int = 0) -> torch.Tensor:
    """Call varlen_attn. Its options differ: torch 2.10 has is_causal, 2.11 window_size, 2.12 enable_gqa."""
    from torch.nn.attention.varlen import varlen_attn

    known = _parameters()
    if window and "window_size" not in known:
        raise BackendError("attention within a window needs torch 2.11 or newer on a GPU")
    options: dict[str, Any] = {"window_size": (window - 1, 0)} if "window_size" in known else {"is_causal": True}
    if query.shape[1] != key.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    boundaries = runs.query_boundaries, runs.key_boundaries
    attended: Any = varlen_attn(query, key, value, *boundaries, runs.longest_query, runs.longest_key, **options)
    return attended  # type: ignore[no-any-return]


@functools.cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _newer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    attended, _lse = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=runs.query_boundaries,
        cu_seqlens_k=runs.key_boundaries,
        max_seqlen_q=runs.longest_query,
        max_seqlen_k=runs.longest_key,
        causal=True,
    )
    return attended  # type: ignore[no-any-return]


@functools.cache
def _has_newer(dtype: torch.dtype, head_size: int, repeats: int) -> bool:
    """Return whether flash-attn-4 can be used for heads of this size, ``repeats`` of which share a key head."""
    try:
        importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    # Its compiler warns of an argument of the package itself.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)
    problem = find_problem(lambda: _agrees(_newer, dtype, head_size=head_size, repeats=repeats))
    if problem:
        log.warning(
            "%s cannot be used with heads of %d, so torch's FlashAttention is: %s", _PACKAGE, head_size, problem
        )
    return not problem


@functools.cache
def takes_fewer_key_heads(dtype: torch.dtype) -> bool:
    """Return whether torch's FlashAttention supports grouped-query attention, forward and backward.

    The kernel does, but torch before 2.12 does not tell whether it exposes this.
    """
    try:
        return _agrees(_of_torch, dtype, head_size=64, repeats=2)
    except (RuntimeError, ValueError):
        return False


def _agrees(kernels: Callable[..., torch.Tensor], dtype: torch.dtype, *, head_size: int, repeats: int) -> bool:
    """Compare ``kernels`` with torch's on repeated heads, in values and gradients, where keys outnumber queries."""
    random = torch.Generator("cuda").manual_seed(0)
    of_queries, of_keys = (
        torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 120, 176], [0, 200, 256])
    )
    runs = Runs(query_boundaries=of_queries, key_boundaries=of_keys, longest_query=120, longest_key=200)
    inputs = [
        torch.randn(tokens, heads, head_size, device="cuda", dtype=dtype, generator=random)
        for tokens, heads in ((176, 2 * repeats), (256, 2), (256, 2))
    ]

    def attended(
        attend: Callable[..., torch.Tensor], times: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys, values = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (key, value))
        return attend(query, keys, values, runs)

    results = [
        with_gradients(functools.partial(attended, attend, times), inputs)
        for attend, times in ((kernels, 1), (_of_torch, repeats))
    ]
    return all(torch.allclose(a, b, atol=5e-2, rtol=5e-2) for a, b in zip(*results, strict=True))
