"""The gated delta rule in chunks, and the convolution before it, are what a loop over the tokens of a sequence does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from asyncrl.backends.kernels import delta_rule, flash_linear_attention
from asyncrl.backends.kernels.delta_rule import Chunks

CPU = torch.device("cpu")
LENGTHS = [(1,), (64,), (65, 3, 130, 64, 1)]
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, WIDTH = 2, 6, 8, 12, 4


def boundaries(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths]).astype(np.int32)


def inputs(num_tokens: int) -> list[torch.Tensor]:
    """Queries, keys, values, decays and steps; decays from next to 1 to next to 0."""
    random = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(num_tokens, *sizes, generator=random)

    decays = -torch.rand(num_tokens, VALUE_HEADS, generator=random).pow(4) * 20
    heads = normal(KEY_HEADS, KEY_SIZE), normal(KEY_HEADS, KEY_SIZE), normal(VALUE_HEADS, VALUE_SIZE)
    return [x.requires_grad_() for x in (*heads, decays, normal(VALUE_HEADS).sigmoid())]


def token_by_token(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """The recurrence of the paper, in float64."""
    query, key, value, log_decay, step = (x.double() for x in tensors)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1) for x in (query, key))
    outputs, begin = [], 0
    for length in lengths:
        state = torch.zeros(VALUE_HEADS, KEY_SIZE, VALUE_SIZE, dtype=torch.float64)
        for t in range(begin, begin + length):
            state = log_decay[t].exp()[:, None, None] * state
            known = (state * key[t][:, :, None]).sum(1)
            state = state + key[t][:, :, None] * (step[t][:, None] * (value[t] - known))[:, None]
            outputs.append((state * query[t][:, :, None]).sum(1) / KEY_SIZE**0.5)
        begin += length
    return torch.stack(outputs)


def assert_same(
    made: Callable[[], torch.Tensor], expected: Callable[[], torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Compare values, and the gradients of all inputs for a random gradient of the output."""
    results = []
    for function in (made, expected):
        output = function()
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        results.append([output, *torch.autograd.grad((output * direction).sum(), tensors)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunked_delta_rule_equals_a_loop_over_tokens(lengths: tuple[int, ...]) -> None:
    tensors, chunks = inputs(sum(lengths)), Chunks.from_boundaries(boundaries(lengths), CPU)
    assert_same(
        lambda: delta_rule.gated_delta_rule(*tensors, chunks),
        lambda: token_by_token(tensors, lengths),
        tensors,
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_convolution_stays_within_sequences(lengths: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), 10, generator=random).requires_grad_()
    kernels = torch.randn(10, 1, WIDTH, generator=random).requires_grad_()
    chunks = Chunks.from_boundaries(boundaries(lengths), CPU)

    def one_by_one() -> torch.Tensor:
        sequences = [F.pad(sequence.T, (WIDTH - 1, 0)) for sequence in x.split(lengths)]
        return torch.cat([F.silu(F.conv1d(one[None], kernels, groups=10))[0].T for one in sequences])

    assert_same(lambda: delta_rule.short_convolution(x, kernels, chunks), one_by_one, [x, kernels])


@pytest.mark.parametrize(("agrees", "has_kernels"), [(False, True), (True, True), (True, False)])
def test_kernels_that_do_not_agree_or_are_not_wanted_are_not_called(
    agrees: bool, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def kernels(name: str) -> Callable[..., torch.Tensor]:
        return lambda first, *_, **__: used.append(name) or first

    for name in ("gated_delta_rule", "short_convolution"):
        monkeypatch.setattr(flash_linear_attention, name, kernels(name))
    monkeypatch.setattr(delta_rule, "_may_have_kernels", lambda x: True)
    for name in ("rule_agrees", "convolution_agrees"):
        monkeypatch.setattr(delta_rule, name, lambda *_: agrees)
    chunks = Chunks.from_boundaries(boundaries((3,)), CPU, has_kernels=has_kernels)
    delta_rule.gated_delta_rule(*inputs(3), chunks)
    delta_rule.short_convolution(torch.zeros(3, 2), torch.zeros(2, 1, WIDTH), chunks)
    assert used == (["gated_delta_rule", "short_convolution"] if agrees and has_kernels else [])
