"""The arithmetic between the matrix products: against torch's own layers, and as the compiler takes it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from asyncrl.backends import kernels

ROWS, GROUPS, QUERIES, SIZE, EPS = 6, 2, 3, 8, 1e-6


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.rotary(torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([1.0, 0.5, 0.25, 0.125]))


def test_rms_norm_is_that_of_torch() -> None:
    x, weight = random(ROWS, 16), random(16)
    torch.testing.assert_close(kernels.rms_norm(x, weight, EPS), F.rms_norm(x, (16,), weight, EPS))


def test_swiglu_gates_the_second_half_with_the_first() -> None:
    x = torch.tensor([[0.0, 2.0, 3.0, 5.0]])
    silu = 2 / (1 + math.exp(-2))
    torch.testing.assert_close(kernels.swiglu(x), torch.tensor([[0.0, 5 * silu]]))


def test_a_rotation_turns_each_pair_by_its_angle() -> None:
    """Pairs are (i, i + size / 2), as in Hugging Face models; row 4 is position 1."""
    mixed = random(ROWS, GROUPS * (QUERIES + 2) * SIZE)
    query, key, value = kernels.heads(mixed, *angles(), None, None, GROUPS, EPS)
    group = mixed.detach()[4].view(GROUPS, QUERIES + 2, SIZE)[1]
    for rotated, original in ((query[4, GROUPS + 2], group[1]), (key[4, 1], group[QUERIES])):
        turned = torch.polar(torch.ones(4), torch.tensor([1.0, 0.5, 0.25, 0.125])) * torch.complex(
            *original.split(SIZE // 2)
        )
        torch.testing.assert_close(rotated, torch.cat([turned.real, turned.imag]))
    torch.testing.assert_close(value[4, 1], group[QUERIES + 1])


def test_queries_and_keys_are_normalised_before_they_are_rotated() -> None:
    mixed, query_weight, key_weight = random(ROWS, GROUPS * (QUERIES + 2) * SIZE), random(SIZE), random(SIZE)
    query, key, _ = kernels.heads(mixed, *angles(), query_weight, key_weight, GROUPS, EPS)
    grouped = mixed.view(ROWS, GROUPS, QUERIES + 2, SIZE)
    normed = torch.cat(
        [
            F.rms_norm(grouped[:, :, :-2], (SIZE,), query_weight, EPS),
            F.rms_norm(grouped[:, :, -2:-1], (SIZE,), key_weight, EPS),
            grouped[:, :, -1:],
        ],
        dim=2,
    )
    expected = kernels.heads(normed.flatten(1), *angles(), None, None, GROUPS, EPS)
    torch.testing.assert_close((query, key), expected[:2])


def test_what_is_remade_is_not_kept_and_gives_the_same_gradient() -> None:
    x, weight = random(ROWS, 16), random(4, 8)
    made: list[int] = []

    def make() -> torch.Tensor:
        made.append(1)
        return kernels.swiglu(x)

    gated = kernels.swiglu(x)
    with kernels.remade(gated, make):
        out = gated @ weight.T
    expected = torch.autograd.grad((kernels.swiglu(x) @ weight.T).square().sum(), (x, weight))
    assert not made
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (x, weight)), expected)
    assert made


CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "rms_norm": lambda rows: (random(rows, 16), random(16), EPS),
    "swiglu": lambda rows: (random(rows, 16),),
    "row_statistics": lambda rows: (random(rows, 20).detach(), torch.arange(rows) - 1, 0.7),
    "logits_gradient": lambda rows: (
        random(rows, 20).detach(),
        torch.arange(rows) - 1,
        torch.ones(rows),
        torch.ones(rows),
        0.7,
    ),
    "logits_gradient_with_entropy": lambda rows: (
        random(rows, 20).detach(),
        torch.arange(rows) - 1,
        torch.ones(rows),
        torch.ones(rows),
        0.7,
        torch.ones(rows),
        torch.ones(rows),
    ),
}


INTERPRETED = """
import torch
from asyncrl.backends import kernels
from benchmarks.gpu import triton_heads

for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    for groups, queries, size, has_norm in ((2, 3, 8, True), (1, 1, 12, True), (4, 4, 16, False)):
        tokens = triton_heads._STEPS + 3
        mixed = torch.randn(tokens, groups * (queries + 2) * size).to(dtype).requires_grad_()
        weights = [torch.randn(size).to(dtype).requires_grad_() for _ in range(2)] if has_norm else [None, None]
        angles = kernels.rotary(torch.arange(tokens), torch.rand(size // 2))
        inputs = [mixed, *(weights if has_norm else [])]
        results = []
        for function in (kernels.heads, triton_heads.heads):
            out = function(mixed, *angles, *weights, groups, 1e-6)
            slopes = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(dtype) for x in out]
            results.append([*out, *torch.autograd.grad(out, inputs, slopes)])
        for expected, got in zip(*results):
            torch.testing.assert_close(got, expected, atol=tolerance * float(expected.detach().abs().max()), rtol=0)
"""


@pytest.mark.slow
def test_the_kernel_of_heads_is_the_plain_one() -> None:
    """In Triton's interpreter, which must be asked for before Triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_compiler_takes_each_whole_and_once_for_any_number_of_rows(name: str) -> None:
    function = getattr(kernels, name)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = kernels.on_rows(torch.compile(function.__wrapped__, fullgraph=True, backend=backend))
    for rows in (5, 11, 3):
        arguments = CALLS[name](rows)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert len(graphs) == 1


def test_what_the_compiler_cannot_compile_runs_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise torch._dynamo.exc.BackendCompilerFailed("inductor", AssertionError("sizes"), None)

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    on_gpu = SimpleNamespace(is_cuda=True, rows=3)
    plain = kernels.fused(lambda x: x.rows)
    assert [plain(on_gpu), plain(on_gpu)] == [3, 3]
    assert caplog.text.count("is not compiled") == 1
