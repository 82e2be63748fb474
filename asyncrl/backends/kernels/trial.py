"""A first try of kernels that come from an optional package: do they work here, and compute what torch does?

Tests: tests/unit/backends/kernels/test_delta_rule.py, test_flash.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def with_gradients(compute: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output, and the gradient of the sum of its squares for each input."""
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [one.clone().requires_grad_() for one in inputs]
        out = compute(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def find_problem(agrees: Callable[[], bool]) -> str:
    """Return why kernels cannot be used; empty if they can.  agrees: compares their results with torch's

    Raises errors that say nothing about the kernels: no memory is left, or the GPU can no longer be used.
    """
    try:
        return "" if agrees() else "its results differ"
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # packages compile kernels, and may raise anything
        return f"{type(error).__name__}: {error}"
