"""Snapshots of weights, and memory that leaves the device and returns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.snapshot import Snapshot


def tensors(*names: str, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, torch.randn(3, 5, generator=generator).to(dtype)) for name in names]


def test_snapshot_keeps_every_bit() -> None:
    given = [
        ("matrix", torch.randn(7, 3)),
        ("transposed", torch.randn(4, 6, dtype=torch.float64).T),
        ("half", torch.randn(5).bfloat16()),
        ("scalar", torch.tensor(3)),
        ("nan", torch.tensor([float("nan"), -0.0])),
    ]
    taken = dict(Snapshot.from_tensors(given).tensors())
    assert taken.keys() == dict(given).keys()
    for name, tensor in given:
        assert (taken[name].dtype, taken[name].shape) == (tensor.dtype, tensor.shape)
        assert taken[name].contiguous().view(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().view(-1).view(torch.uint8).tolist()
        )


def test_buckets_are_ordered_by_width_then_arrival() -> None:
    given = [*tensors("b", "a", dtype=torch.bfloat16), *tensors("d", "c")]
    snapshot = Snapshot.from_tensors(given)
    assert [name for name, _ in snapshot.tensors()] == ["d", "c", "b", "a"]
    assert [entry.name for entry in snapshot.entries] == ["d", "c", "b", "a"]


def test_a_bucket_holds_no_more_than_its_bound_unless_one_tensor_is_larger() -> None:
    large = ("large", torch.zeros(100))
    snapshot = Snapshot.from_tensors([*tensors("a", "b", "c", "x"), large], bucket_bytes=130)
    assert [[entry.name for entry in bucket.entries] for bucket in snapshot.buckets] == [
        ["a", "b"],
        ["c", "x"],
        ["large"],
    ]


def test_no_more_than_a_bucket_of_tensors_is_held_beside_the_copy() -> None:
    """A bucket holds two tensors of 60 bytes each; the third tensor arrives while two are held."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            tensor = torch.full((15,), float(number))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in alive))
            yield str(number), tensor

    snapshot = Snapshot.from_tensors(made(), bucket_bytes=130)
    assert [float(tensor[0]) for _, tensor in snapshot.tensors()] == list(range(20))
    assert most == 3


def test_a_snapshot_cut_into_smaller_buckets_has_the_same_bytes_and_copies_none() -> None:
    snapshot = Snapshot.from_tensors([*tensors("a", "b", "c"), ("large", torch.zeros(100))])
    (whole,) = snapshot.buckets
    cut = snapshot.cut(130)
    assert [[entry.name for entry in bucket.entries] for bucket in cut.buckets] == [["a", "b"], ["c"], ["large"]]
    assert torch.equal(torch.cat([bucket.data for bucket in cut.buckets]), whole.data)
    assert all(torch.equal(tensor, dict(snapshot.tensors())[name]) for name, tensor in cut.tensors())
    assert cut.buckets[0].data.data_ptr() == whole.data.data_ptr()


def test_floating_tensors_take_the_wanted_type_and_others_keep_theirs() -> None:
    snapshot = Snapshot.from_tensors([*tensors("a"), ("count", torch.tensor([1, 2]))], dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in snapshot.tensors()} == {"a": torch.bfloat16, "count": torch.int64}


def test_snapshot_does_not_change_with_the_weights() -> None:
    ((name, weight),) = tensors("a")
    snapshot = Snapshot.from_tensors([(name, weight)])
    before = weight.clone()
    weight.add_(1.0)
    assert torch.equal(dict(snapshot.tensors())[name], before)


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
