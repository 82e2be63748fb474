"""A forward pass of a dense transformers model in which the numbers of a token depend on its own tokens alone.

Kernels choose the order of their sums by the shape of the whole batch, so a token's logits change in the last bits with
its neighbours: an engine that decodes 7 rows and a learner that reads 500 disagree by rounding. Under ``ExactRows``
every product, mean and activation is computed for one token at a time, and attention for one query over the keys that
it sees, always in tensors of the same shape and layout. Then the engine's logprobs are the learner's, to the bit:

  E1 a token's logits are the same whether it is prefilled, decoded or trained, beside whichever others
  E2 gradients are those of the ordinary pass; they need no such order, because no engine computes them
Tests: tests/unit/tensors/test_exact_rows.py, tests/integration/learning/test_exact.py.

Additions and products of single numbers round in the same way everywhere and need no care. It is for CPUs, where it
costs what a loop in Python costs. On GPUs SGLang's own kernels take its place (backends/kernels/sglang_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ATTENTION: Final = "asyncrl_exact"


class ExactRows(TorchFunctionMode):
    """While it is active, in this thread, functions over a token's numbers compute one token at a time."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function in _OVER_A_ROW and isinstance(arguments[0], torch.Tensor) and arguments[0].dim() > 1:
            return _by_rows(lambda rows, *others: function(rows, *others, **options), *arguments)
        return function(*arguments, **options)


_OVER_A_ROW: Final = frozenset(
    {
        F.linear,
        F.silu,
        torch.mean,
        torch.Tensor.mean,
        torch.cos,
        torch.Tensor.cos,
        torch.sin,
        torch.Tensor.sin,
        torch.log_softmax,
        torch.Tensor.log_softmax,
        F.log_softmax,
    }
)
"""Their results in the last bits depend on the number of rows, or on where a row lies within a vector register."""


def _by_rows(function: Callable[..., torch.Tensor], rows: torch.Tensor, *others: Any) -> torch.Tensor:
    """function(rows [..., K], *others) -> [..., *], one row at a time, with the gradient of all rows at once."""
    return exactly(_each_row, function, rows, *others)


def _each_row(function: Callable[..., torch.Tensor], rows: torch.Tensor, *others: Any) -> torch.Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    made = torch.cat([function(row.clone()[None], *others) for row in flat])
    return made.reshape(*rows.shape[:-1], made.shape[-1])


def exactly(exact: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """Return exact(function, *inputs), with the gradient of function(*inputs)."""
    result: torch.Tensor = _Exact.apply(exact, function, *inputs)  # type: ignore[no-untyped-call]
    return result


class _Exact(torch.autograd.Function):
    """exact(function, *inputs) forward; function(*inputs) backward."""

    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor], *inputs: Any
    ) -> Any:
        ctx.function = function
        ctx.are_tensors = [isinstance(one, torch.Tensor) for one in inputs]
        ctx.others = [None if is_tensor else one for one, is_tensor in zip(inputs, ctx.are_tensors, strict=True)]
        ctx.save_for_backward(*(one for one in inputs if isinstance(one, torch.Tensor)))
        return exact(function, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        inputs = [
            next(saved).detach() if is_one else one for one, is_one in zip(ctx.others, ctx.are_tensors, strict=True)
        ]
        wanted = [place for place, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        for place in wanted:
            inputs[place] = inputs[place].requires_grad_()
        with torch.enable_grad():
            made = ctx.function(*inputs)
        found = torch.autograd.grad(made, [inputs[place] for place in wanted], gradient)
        gradients: list[Any] = [None] * len(inputs)
        for place, one in zip(wanted, found, strict=True):
            gradients[place] = one
        return (None, None, *gradients)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` [n, heads, tokens, size] over the first keys of [n, fewer heads, columns, size].

    attention_mask   bool[n or 1, 1, tokens, columns], of which each query sees a prefix; None: causal, and the last
                     query sees all
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens, columns = query.shape[2], key.shape[2]
    if attention_mask is None:
        lengths = torch.arange(columns - tokens + 1, columns + 1).expand(query.shape[0], tokens)
    else:
        lengths = attention_mask.sum(-1)[:, 0].expand(query.shape[0], tokens)

    def exact(_function: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = key.shape[1]
        result = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype)
        for sequence, counts in enumerate(lengths.tolist()):
            for token, count in enumerate(counts):
                own = query[sequence, :, token].reshape(groups, -1, query.shape[-1]).clone()
                keys, values = (
                    one[sequence, :, :count].clone(memory_format=torch.contiguous_format) for one in (key, value)
                )
                weights = torch.softmax((own @ keys.transpose(1, 2)).float() * scale, dim=-1).to(query.dtype)
                result[sequence, :, token] = (weights @ values).reshape(query.shape[1], -1)
        return result

    def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(columns) < lengths[:, None, :, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)

    return exactly(exact, whole, query, key, value).transpose(1, 2), None


def use_exact_attention(model: Any) -> None:
    """Let a loaded model attend by ``attention``."""
    transformers.AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
