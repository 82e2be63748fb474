"""Compiled kernels on a GPU, compared with the same functions on the CPU."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.backends.kernels import delta_rule, flash, flash_linear_attention, fused
from asyncrl.backends.kernels.delta_rule import Chunks
from asyncrl.backends.kernels.expert_rows import sums_of_rows
from asyncrl.backends.kernels.rounded_experts import rounded_product
from asyncrl.backends.kernels.token_logprobs import linear_logprobs
from asyncrl.tensors import int4

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

ROWS, HIDDEN, HEAD, GROUPS, QUERIES, VOCABULARY, EPS = 257, 256, 64, 2, 2, 4096, 1e-6


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def calls() -> dict[str, tuple[Any, ...]]:
    angles = fused.rotary(torch.arange(ROWS), 1e4 ** -torch.linspace(0, 1, HEAD // 2))
    mixed = random(ROWS, GROUPS * (QUERIES + 2) * HEAD)
    return {
        "rms_norm": (random(ROWS, HIDDEN), random(HIDDEN), EPS),
        "swiglu": (random(ROWS, 2 * HIDDEN),),
        "heads": (mixed, *angles, random(HEAD), random(HEAD, seed=1), GROUPS, HEAD, EPS),
        "scored_swiglu": (random(ROWS, 2 * HIDDEN), random(ROWS)),
        "scored_clamped_swiglu": (random(ROWS, 2 * HIDDEN) * 4, random(ROWS)),
    }


def leaves(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Copy ``arguments`` to ``device``; float tensors require gradients."""
    return tuple(
        one.detach().to(device).requires_grad_(one.is_floating_point()) if isinstance(one, torch.Tensor) else one
        for one in arguments
    )


@pytest.mark.parametrize("name", calls())
def test_a_fused_layer_and_its_gradients_are_those_of_the_cpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In float32, up to the rounding error of sums of a few hundred numbers."""
    function, results = getattr(fused, name), {}
    with caplog.at_level(logging.WARNING):
        for device in ("cpu", "cuda"):
            arguments = leaves(calls()[name], device)
            out = function(*arguments)
            outputs = out if isinstance(out, tuple) else (out,)
            slopes = [torch.linspace(-1, 1, one.numel(), device=device).view(one.shape) for one in outputs]
            inputs = [one for one in arguments if isinstance(one, torch.Tensor)]
            gradients = torch.autograd.grad(outputs, inputs, slopes, allow_unused=True)
            results[device] = [*outputs, *gradients]
    assert "runs uncompiled" not in caplog.text
    for expected, got in zip(results["cpu"], results["cuda"], strict=True):
        if got is not None:  # only the plain function gives angles a gradient, and the training does not need it
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_the_sums_of_expert_rows_are_those_of_the_cpu() -> None:
    x, places = random(ROWS * 4, HIDDEN), torch.randperm(ROWS * 4).view(ROWS, 4)
    torch.testing.assert_close(sums_of_rows(x.cuda(), places.cuda()).cpu(), sums_of_rows(x, places))


def test_weights_of_experts_in_4_bits_are_those_of_the_cpu() -> None:
    """To the bit, packed for engines and rounded for a pass; and products with them, where an expert has no row."""
    weights, ends = random(3, HIDDEN, HIDDEN).bfloat16(), torch.tensor([100, 100, ROWS], dtype=torch.int32)
    rounded = int4.round_weights(weights, group=32)
    assert torch.equal(int4.round_weights(weights.cuda(), group=32).cpu(), rounded)
    for ours, theirs in zip(
        int4.quantize(weights[0].cuda(), group=32), int4.quantize(weights[0], group=32), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs)
    results = {}
    for device in ("cpu", "cuda"):
        x = random(ROWS, HIDDEN).bfloat16().to(device).requires_grad_()
        whole = weights.to(device).requires_grad_()
        out = rounded_product(x, whole, ends.to(device), 32)
        results[device] = [out, *torch.autograd.grad(out, [x, whole], random(ROWS, HIDDEN).bfloat16().to(device))]
    for expected, got in zip(results["cpu"], results["cuda"], strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_logprobs_entropy_and_gradients_are_those_of_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16 keeps 8 bits: logits of about 1 are off by 2^-8, and summed gradients by a few times that."""
    results = {}
    for device, precision in (("cpu", torch.float32), ("cuda", dtype)):
        hidden = random(ROWS, HIDDEN).to(dtype).to(device, precision).requires_grad_()
        weight = (random(VOCABULARY, HIDDEN, seed=1) / HIDDEN**0.5).to(dtype).to(device, precision).requires_grad_()
        targets = torch.arange(ROWS, device=device) % (VOCABULARY - 10)
        logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature=0.7, vocabulary_size=VOCABULARY - 10)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        results[device] = [one.float().cpu() for one in (logprobs, entropy, hidden.grad, weight.grad)]
    for expected, got in zip(results["cpu"], results["cuda"], strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("query_lengths", "key_lengths"), [((200, 56, 1), (200, 56, 1)), ((7, 120), (300, 120))])
def test_attention_within_sequences_and_its_gradients_are_those_of_the_cpu(
    query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], window: int
) -> None:
    """Of whichever kernels are installed: flash-attn-4's or torch's."""
    dtype, size = torch.bfloat16, 128
    inputs = [
        random(sum(lengths), heads, size, seed=seed).to(dtype)
        for seed, (lengths, heads) in enumerate([(query_lengths, 4), (key_lengths, 2), (key_lengths, 2)])
    ]
    ends = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (query_lengths, key_lengths)]
    slopes = random(sum(query_lengths), 4, size)
    on_gpu = [one.cuda().requires_grad_() for one in inputs]
    runs = flash.Runs(
        query_boundaries=ends[0].cuda(),
        key_boundaries=ends[1].cuda(),
        longest_query=max(query_lengths),
        longest_key=max(key_lengths),
    )
    query, key, value = on_gpu
    got = flash.attention(query, key, value, runs, window=window)
    gradients = torch.autograd.grad(got, on_gpu, slopes.cuda().to(dtype))
    plain = [one.float().requires_grad_() for one in inputs]
    rows = []
    for (begin, end), (first, last) in zip(*(pairs(each.tolist()) for each in ends), strict=True):
        query, key, value = plain[0][begin:end], plain[1][first:last], plain[2][first:last]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, dim=1)) / size**0.5
        behind = torch.arange(last - first - (end - begin), last - first)[:, None] - torch.arange(last - first)
        is_seen = (behind >= 0) & (behind < (window or last))
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, dim=1)))
    expected = torch.cat(rows)
    for theirs, ours in zip([expected, *torch.autograd.grad(expected, plain, slopes)], [got, *gradients], strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, rtol=3e-2, atol=3e-2)


def pairs(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip(ends[:-1], ends[1:], strict=True))


def test_linear_attention_in_kernels_is_that_in_plain_torch() -> None:
    """In bfloat16, on sequences of 100, 1 and 200 tokens, up to the rounding of 8 bits in a sum of products."""
    if not flash_linear_attention.is_installed():
        pytest.skip("needs flash-linear-attention")
    if torch.cuda.get_device_capability()[0] == 9 and (3, 4) <= triton_version() < (3, 7, 1):
        pytest.skip("flash-linear-attention refuses gradients on Hopper with this Triton")
    gpu = torch.device("cuda", 0)
    assert delta_rule.convolution_agrees(gpu, torch.bfloat16, 8 * 64, 4)
    assert delta_rule.rule_agrees(gpu, torch.bfloat16, torch.Size([2, 64]), torch.Size([4, 64]))
    boundaries = np.array([0, 100, 101, 301], np.int32)
    mixed, kernels = random(301, 8 * 64), random(8 * 64, 1, 4)
    decays, steps = -random(301, 4, seed=1).square(), random(301, 4).sigmoid()
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        chunks = Chunks.from_boundaries(boundaries, torch.device(device))
        x, weights = (one.to(device, dtype).requires_grad_() for one in (mixed, kernels))
        decay, step = (one.to(device).requires_grad_() for one in (decays, steps))
        heads = delta_rule.short_convolution(x, weights, chunks).view(301, 8, 64)
        read = delta_rule.gated_delta_rule(heads[:, :2], heads[:, 2:4], heads[:, 4:], decay, step, chunks)
        slope = torch.linspace(-1, 1, read.numel(), device=device).view(read.shape)
        results[device] = [read, *torch.autograd.grad((read * slope).sum(), [x, weights, decay, step])]
    for expected, got in zip(results["cpu"], results["cuda"], strict=True):
        assert (got.cpu().float() - expected).norm() < 0.05 * expected.norm()


def triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:3])
