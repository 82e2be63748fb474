"""Products with rounded weights of experts, against the same in steps."""

from __future__ import annotations

import pytest
import torch

from asyncrl.backends.kernels.rounded_experts import rounded_product
from asyncrl.tensors import int4

GROUP = 32
COUNTS = (2, 0, 3)
"""The second expert has no token."""


@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0)])
def test_the_product_is_of_rounded_weights_and_gradients_pass_rounding(counts: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    rows = sum(counts)
    x = torch.randn(rows, 64, generator=random).requires_grad_()
    weights = torch.randn(3, 16, 64, generator=random).requires_grad_()
    slopes = torch.randn(rows, 16, generator=random)
    out = rounded_product(x, weights, torch.tensor(counts).cumsum(0).int(), GROUP)
    grad_x, grad_weights = torch.autograd.grad(out, [x, weights], slopes)

    rounded = int4.round_weights(weights.detach(), group=GROUP)
    assert not torch.equal(rounded, weights)
    of_rows = rounded.repeat_interleave(torch.tensor(counts), dim=0)
    torch.testing.assert_close(out, torch.einsum("ni,noi->no", x, of_rows))
    torch.testing.assert_close(grad_x, torch.einsum("no,noi->ni", slopes, of_rows))
    expected = [part.t() @ of_x for part, of_x in zip(slopes.split(counts), x.split(counts), strict=True)]
    torch.testing.assert_close(grad_weights, torch.stack(expected))


def test_frozen_weights_get_no_gradient_and_the_input_does() -> None:
    x, weights = torch.randn(5, 64, requires_grad=True), torch.randn(3, 16, 64)
    rounded_product(x, weights, torch.tensor(COUNTS).cumsum(0).int(), GROUP).sum().backward()
    assert x.grad is not None and x.grad.any()
    assert weights.grad is None
