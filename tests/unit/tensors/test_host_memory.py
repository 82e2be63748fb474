"""Tensors leave their device and return, unnoticed by code that holds views of them."""

from __future__ import annotations

import torch

from asyncrl.tensors.host_memory import HostMemory


def test_host_round_trip_keeps_every_view_bit_for_bit() -> None:
    whole = torch.randn(64)
    view = whole[16:32].view(4, 4)
    weight = torch.nn.Parameter(torch.randn(8).bfloat16())
    scratch = torch.ones(1024)
    before = [tensor.detach().clone() for tensor in (whole, view, weight)]
    memory = HostMemory(lambda: [whole, view, weight], scratch=lambda: [scratch, whole])
    for _ in range(2):
        memory.offload()
        assert [tensor.untyped_storage().nbytes() for tensor in (whole, view, weight, scratch)] == [0] * 4
        memory.onload()
        for tensor, expected in zip((whole, view, weight), before, strict=True):
            assert torch.equal(tensor, expected)
        assert scratch.untyped_storage().nbytes() == 4096
    whole.add_(1)
    assert torch.equal(view, before[1] + 1)


def test_second_offload_keeps_the_newest_values() -> None:
    weight = torch.zeros(4)
    memory = HostMemory(lambda: [weight])
    for step in (1.0, 2.0):
        memory.offload()
        memory.onload()
        assert weight.tolist() == [step - 1] * 4
        weight.fill_(step)
