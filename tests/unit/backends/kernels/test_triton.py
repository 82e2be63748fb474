"""Triton kernels compute the same as the plain functions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

INTERPRETED = """
import torch
from asyncrl.backends.kernels import expert_rows, fused, triton_expert_rows, triton_heads, triton_norm, triton_swiglu

def compare(plain, kernel, inputs, tolerance, **options):
    inputs = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    results = []
    for function in (plain, kernel):
        out = function(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        slopes = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x.dtype) for x in out]
        results.append([*out, *torch.autograd.grad(out, leaves, slopes, allow_unused=True)])
    for expected, got in zip(*results, strict=True):
        if expected is not None and got is not None:  # angles have a gradient in the plain function alone
            atol = tolerance * float(expected.detach().abs().max())
            torch.testing.assert_close(got, expected, atol=atol, rtol=0)

for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    random = lambda *shape: torch.randn(*shape).to(dtype)
    for is_zero_centered in (False, True):
        given = (random(3, 2, 24), random(24), 1e-6, is_zero_centered)
        compare(fused.rms_norm.__wrapped__, triton_norm.rms_norm, given, tolerance)
    compare(fused.swiglu.__wrapped__, triton_swiglu.swiglu, (random(3, 1, 48),), tolerance)
    triton_swiglu._COLUMNS = 16
    compare(fused.scored_swiglu.__wrapped__, triton_swiglu.scored_swiglu, (random(5, 48), torch.rand(5)), tolerance)
    places = torch.tensor([[3, 0], [1, 4], [5, 2]])
    torch.testing.assert_close(
        triton_expert_rows.sums_of_rows(x := random(6, 20), places), expert_rows.plain_sums_of_rows(x, places)
    )
    for groups, queries, size, has_norm in ((2, 3, 8, True), (4, 4, 16, False)):
        tokens = triton_heads._STEPS + 3
        weights = [random(size), random(size)] if has_norm else [None, None]
        angles = [x.detach() for x in fused.rotary(torch.arange(tokens), torch.rand(size // 2))]
        mixed = random(tokens, groups * (queries + 2) * size)
        given = (mixed, *angles, *weights, groups, size, 1e-6)
        compare(fused.heads.__wrapped__, triton_heads.heads, given, tolerance)
        assert triton_heads.heads(*given, True) is None, "interleaved pairs"
        assert triton_heads.heads(*given, False, True) is None and triton_heads.heads(*given, False, False, 2.0) is None
    assert triton_swiglu.swiglu(random(0, 48)) is None and triton_norm.rms_norm(random(0, 24), random(24), 1e-6) is None
"""


@pytest.mark.slow
def test_a_kernel_computes_what_the_plain_function_does() -> None:
    """Run in Triton's interpreter, which must be enabled before Triton is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
