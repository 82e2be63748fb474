"""Operations between matrix products: eager PyTorch on a CPU, fused kernels on CUDA.

All of them are memory-bound. Operations of every layer are our own Triton kernels: launching one takes a fifth of the
host time of a compiled function, and another model size in the same process does not slow them down. torch.compile
handles the other operations, with one kernel for each function and one for its gradient. Computation is in float32.
``torch.compiler.set_stance("force_eager")`` disables the compiler.
Tests: tests/unit/backends/kernels/test_fused.py.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

import torch
import torch.nn.functional as F

log = logging.getLogger("asyncrl.kernels")

_VARIANTS: Final = 64
"""Variants of a function that torch compiles. Widths, dtypes, and passes with and without gradients count: a policy, a
critic and a teacher exceed its default of eight."""
_TAKES_LIMIT: Final = "recompile_limit" in inspect.signature(torch.compile).parameters

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` on first use if its first argument is on CUDA, once for any number of rows.

    If compilation fails (torch's compiler has bugs at some shapes), warn once and run the function eagerly.
    """

    @functools.cache
    def compiled() -> Callable[P, R]:
        limit: dict[str, Any] = {"recompile_limit": _VARIANTS} if _TAKES_LIMIT else {}
        return on_rows(torch.compile(function, fullgraph=True, **limit))  # lazily: its imports take two seconds

    is_compiled = True

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        nonlocal is_compiled
        first: Any = arguments[0]
        if first.is_cuda and is_compiled:
            if not _TAKES_LIMIT:
                torch._dynamo.config.recompile_limit = _VARIANTS  # each thread may have its own
            try:
                return compiled()(*arguments, **options)
            except (torch._dynamo.exc.BackendCompilerFailed, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                is_compiled = False
                cause = getattr(error, "inner_exception", error)
                log.warning("%s runs uncompiled, and slower: torch.compile failed: %r", function.__name__, cause)
        return function(*arguments, **options)

    return run


def in_triton(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """On CUDA, call the function of the same name in ``module``. Otherwise, or if it returns None, use ``fused``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        otherwise = fused(function)

        @functools.wraps(function)
        def run(*arguments: P.args, **options: P.kwargs) -> R:
            first: Any = arguments[0]
            if first.is_cuda:
                kernel = getattr(importlib.import_module(f"asyncrl.backends.kernels.{module}"), function.__name__)
                if (made := kernel(*arguments, **options)) is not None:
                    return made  # type: ignore[no-any-return]
            return otherwise(*arguments, **options)

        return run

    return decorate


def on_rows(compiled: Callable[P, R]) -> Callable[P, R]:
    """Mark dim 0 of the first argument, and of tensors with the same size there, as dynamic for ``compiled``."""

    def run(*arguments: P.args, **options: P.kwargs) -> R:
        first: Any = arguments[0]
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.ndim and argument.shape[0] == first.shape[0]:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments, **options)

    return run


@in_triton("triton_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool = False) -> torch.Tensor:
    """[..., H] x [H] -> [..., H]. A zero-centred weight multiplies as 1 + weight, in float32."""
    return _normalize(x, weight, eps, is_zero_centered)


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float, is_zero_centered: bool) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype) if is_zero_centered else weight * normed.to(x.dtype)


@in_triton("triton_swiglu")
def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Concatenated gate and up [..., 2 F] -> silu(gate) x up [..., F]"""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
def geglu(x: torch.Tensor) -> torch.Tensor:
    """Concatenated gate and up [..., 2 F] -> gelu(gate) x up [..., F], by the tanh approximation, arXiv:1606.08415"""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@in_triton("triton_swiglu")
def scored_swiglu(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """``swiglu`` with each row multiplied by its score f32[N]: [N, 2 F] -> [N, F]"""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * scores[:, None]).to(x.dtype)


@fused
def scored_clamped_swiglu(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate, with each row multiplied by its score f32[N]: [N, 2 F] -> [N, F].

    With gate at most 7 and up within [-7, 7]: gate x sigmoid(1.702 gate) x (up + 1)
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1) * scores[:, None]).to(x.dtype)


def rotary(positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [N], or [N, d / 2] if each frequency has its own, radians per position f32[d / 2] -> cosines and sines
    f32[N, d / 2] for ``heads``."""
    angles = positions[:, None] * frequencies if positions.ndim == 1 else positions * frequencies
    return (angles.cos(), angles.sin()) if scale == 1.0 else (angles.cos() * scale, angles.sin() * scale)


@in_triton("triton_heads")
def heads(
    mixed: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    groups: int,
    size: int,
    eps: float,
    is_interleaved: bool = False,
    is_zero_centered: bool = False,
    query_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of attention from one projection: split, normalise if there are weights [d], and rotate.

    mixed [N, groups x (queries + 2) x d], d = ``size``; a group is its queries, its key, its value
    -> query [N, groups x queries, d], key and value [N, groups, d]
    """
    grouped = mixed.view(mixed.shape[0], groups, -1, size)
    query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if query_weight is not None and key_weight is not None:
        query = _normalize(query, query_weight, eps, is_zero_centered)
        key = _normalize(key, key_weight, eps, is_zero_centered)
    query, key = (_rotate(x, cosines, sines, is_interleaved) for x in (query, key))
    return query if query_scale == 1.0 else query * query_scale, key, value.contiguous()


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Rotate the first d numbers of each head. Pairs are (i, i + d / 2), as in most Hugging Face models, or interleaved
    (2 i, 2 i + 1). Results have the order of pairs (i, i + d / 2) in both cases; scores do not depend on it."""
    half = cosines.shape[-1]
    if is_interleaved:
        first, second = x[..., 0 : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
    else:
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = _rotate_pairs(first, second, cosines, sines).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], dim=-1)


def _rotate_pairs(
    first: torch.Tensor, second: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> torch.Tensor:
    """Rotate the two halves of pairs [N, heads, d / 2] -> [N, heads, d]"""
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


@fused
def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """[N, heads, d] -> [N, heads, d], of which the first 2 x cosines.shape[1] numbers are rotated, as in ``heads``"""
    return _rotate(x, cosines, sines, is_interleaved)


@fused
def latent_heads(
    queries: torch.Tensor,
    keys_and_values: torch.Tensor,
    shared_key: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    plain_size: int,
    is_interleaved: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of latent attention. In every head, the part of ``plain_size`` is unchanged and a part of r is rotated.

    queries [N, heads, plain + r], keys_and_values [N, heads, plain + v], shared_key [N, 1, r]
    -> query (times ``scale``) and key [N, heads, plain + r], value [N, heads, plain + r], padded with 0 after v
    """
    query, key = (_rotate(x, cosines, sines, is_interleaved) for x in (queries[..., plain_size:], shared_key))
    query = torch.cat([queries[..., :plain_size], query], dim=-1)
    key = torch.cat([keys_and_values[..., :plain_size], key.expand(-1, queries.shape[1], -1)], dim=-1)
    value = keys_and_values[..., plain_size:]
    return query * scale, key, F.pad(value, (0, key.shape[-1] - value.shape[-1]))


@fused
def row_statistics(logits: torch.Tensor, columns: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
    """logits [M, V], columns i64[M] (negative: on another rank) -> f32[4, M], with x = logits / temperature (a number
    or f32[M, 1], here and below):
    largest x; sum of e = exp(x - largest); sum of e x; x at the column, or 0.
    """
    x = logits.float() / temperature
    largest = x.amax(dim=-1)
    exponentials = (x - largest[:, None]).exp()
    own = x.gather(-1, columns.clamp(min=0)[:, None])[:, 0]
    return torch.stack([largest, exponentials.sum(-1), (exponentials * x).sum(-1), torch.where(columns >= 0, own, 0.0)])


@fused
def logits_gradient(
    logits: torch.Tensor,
    columns: torch.Tensor,
    log_total: torch.Tensor,
    grad_logprobs: torch.Tensor,
    temperature: float | torch.Tensor,
) -> torch.Tensor:
    """Gradient of sum(logprobs x grad_logprobs) with respect to logits [M, V]: one-hot - p, p = exp(x - log_total)."""
    p = (logits.float() / temperature - log_total[:, None]).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    return ((is_target.float() - p) * (grad_logprobs[:, None] / temperature)).to(logits.dtype)


@fused
def logits_gradient_with_entropy(
    logits: torch.Tensor,
    columns: torch.Tensor,
    log_total: torch.Tensor,
    grad_logprobs: torch.Tensor,
    temperature: float | torch.Tensor,
    mean: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> torch.Tensor:
    """``logits_gradient`` plus the gradient of sum(entropy x grad_entropy): p (mean - x), where mean = sum p x."""
    x = logits.float() / temperature
    p = (x - log_total[:, None]).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    slope = (is_target.float() - p) * grad_logprobs[:, None] + p * (mean[:, None] - x) * grad_entropy[:, None]
    return (slope / temperature).to(logits.dtype)


@contextmanager
def recompute_in_backward(*tensors: tuple[torch.Tensor, Callable[[], torch.Tensor]]) -> Iterator[None]:
    """Operations inside save a function for the backward pass instead of its tensor, which is then recomputed.

    A matrix product saves its input as a matrix, so the shape may differ.
    """
    makes = {(tensor.data_ptr(), tensor.numel()): make for tensor, make in tensors}

    def pack(saved: torch.Tensor) -> Any:
        make = makes.get((saved.data_ptr(), saved.numel())) if saved.is_contiguous() else None
        return saved if make is None else (make, saved.shape)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        make, shape = kept
        with torch.no_grad():
            return make().view(shape)  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
