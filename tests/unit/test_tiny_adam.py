"""The optimizer of the tests' tiny net."""

from __future__ import annotations

import torch

from tests.harness.tiny.adam import Adam


def test_its_steps_are_those_of_torch_to_the_last_bit_also_from_a_checkpoint() -> None:
    random = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=random, requires_grad=True) for shape in ((31, 8), (8,))]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adam, expected = Adam(ours, **settings), torch.optim.AdamW(theirs, **settings)  # type: ignore[arg-type]
    for step in range(20):
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape, generator=random)
            their.grad = our.grad.clone()
        learning_rate = 1e-3 * (1 + step % 3)
        for group in expected.param_groups:
            group["lr"] = learning_rate
        adam.step(learning_rate)
        expected.step()
        state = adam.state()
        adam = Adam(ours, **settings)  # type: ignore[arg-type]
        adam.load(state)
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))
