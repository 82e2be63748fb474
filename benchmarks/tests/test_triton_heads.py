"""The Triton kernel of attention heads computes what the plain one does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

INTERPRETED = """
import torch
from asyncrl.backends.kernels import fused
from benchmarks.gpu import triton_heads

for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    for groups, queries, size, has_norm in ((2, 3, 8, True), (1, 1, 12, True), (4, 4, 16, False)):
        tokens = triton_heads._STEPS + 3
        mixed = torch.randn(tokens, groups * (queries + 2) * size).to(dtype).requires_grad_()
        weights = [torch.randn(size).to(dtype).requires_grad_() for _ in range(2)] if has_norm else [None, None]
        angles = fused.rotary(torch.arange(tokens), torch.rand(size // 2))
        inputs = [mixed, *(weights if has_norm else [])]
        results = []
        for function in (fused.heads, triton_heads.heads):
            out = function(mixed, *angles, *weights, groups, size, 1e-6)
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
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
