"""Versions that are copied straight to where the first one went: each byte is where load_weights would have put it."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.engines.sglang import destinations
from asyncrl.engines.sglang.destinations import Destinations
from asyncrl.tensors.snapshot import Snapshot

Weights = dict[str, torch.Tensor]
Named = Iterable[tuple[str, torch.Tensor]]
HIDDEN, EXPERTS, INNER, RANKS = 6, 3, 4, 2


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Model(nn.Module):
    """Loads as SGLang's models do.  seen: names that load_weights was given"""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def load_weights(self, named: Named) -> None:
        for name, tensor in named:
            self.seen.append(name)
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        self.get_parameter(name).data.copy_(tensor)


class Mixture(Model):
    """The second of two ranks: q, k and v in one parameter, experts in two, a tied head, and names that are skipped."""

    def __init__(self, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.qkv = parameter(3 * HIDDEN // RANKS, HIDDEN)
        self.w13 = parameter(EXPERTS, 2 * INNER // RANKS, HIDDEN)
        self.w2 = (
            parameter(EXPERTS, INNER // RANKS, HIDDEN) if is_transposed else parameter(EXPERTS, HIDDEN, INNER // 2)
        )
        self.norm, self.embed = parameter(HIDDEN, dtype=torch.float32), parameter(8, HIDDEN)
        self.register_parameter("head", self.embed)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.is_transposed = is_transposed

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        half = HIDDEN // RANKS
        if name in "qkv":
            into = self.qkv.data.narrow(0, "qkv".index(name) * half, half)
            assert into.shape == (part := tensor.narrow(0, half, half)).shape
            into.copy_(part)
        elif "expert" in name:
            _, number, matrix = name.split(".")
            parameter, inner = (self.w2 if matrix == "down" else self.w13), INNER // RANKS
            into, part = parameter.data[int(number)], tensor.narrow(int(matrix == "down"), inner, inner)
            if matrix != "down":
                into = into.chunk(2)[matrix == "up"]
            into.copy_(part.t() if self.is_transposed and matrix == "down" else part)
        elif name == "embed":
            self.embed[: len(tensor)].data.copy_(tensor)
            self.embed[len(tensor) :].data.fill_(0)  # the padding, which is none
        elif name == "bias":
            self.bias[:] = tensor
        elif name == "norm":
            nn.init.zeros_(torch.empty(3))  # of no concern to the model
            self.norm.data.copy_(tensor.detach().view(-1).to(tensor.device).contiguous())

    @staticmethod
    def given(generator: torch.Generator) -> Weights:
        shapes: dict[str, tuple[int, ...]] = {name: (HIDDEN, HIDDEN) for name in "qkv"}
        for number in range(EXPERTS):
            shapes |= {f"expert.{number}.{name}": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes[f"expert.{number}.down"] = (HIDDEN, INNER)
        made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        made |= {
            "norm": torch.randn(HIDDEN, generator=generator).bfloat16(),
            "bias": torch.randn(EXPERTS, generator=generator),
        }
        return made | {
            "embed": torch.randn(8, HIDDEN, generator=generator).bfloat16(),
            "head": torch.zeros(8, HIDDEN),
            "freq": torch.ones(4),
        }


SKIPPED = ["freq", "head"]


class Pair:
    """A model that gets versions by its destinations, and one by load_weights alone."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.ours, self.plain = make(), make()
        self.destinations = Destinations()

    def load(self, *parts: Named) -> list[str]:
        """Load a version in one call a part. Return the names that load_weights got, after comparing all tensors."""
        parts = tuple(list(part) for part in parts)
        self.ours.seen.clear()
        with self.destinations.loading(self.ours) as target:
            for part in parts:
                target.load_weights(iter(part))
        for part in parts:
            self.plain.load_weights((name, tensor.clone()) for name, tensor in part)
        for name, tensor in self.plain.state_dict(keep_vars=True).items():
            assert torch.equal(self.ours.state_dict()[name], tensor), name
        assert torch.equal(getattr(self.ours, "made", torch.ones(1)), getattr(self.plain, "made", torch.ones(1)))
        return sorted(self.ours.seen)


def seeds(count: int = 3) -> Iterator[torch.Generator]:
    return (torch.Generator().manual_seed(seed) for seed in range(count))


@pytest.mark.parametrize("bucket_bytes", [1, 200, 2**20])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_versions_in_any_order_and_buckets_are_as_by_load_weights(is_transposed: bool, bucket_bytes: int) -> None:
    pair = Pair(lambda: Mixture(is_transposed=is_transposed))
    for seed, generator in enumerate(seeds(4)):
        given = list(Mixture.given(generator).items())
        random.Random(seed).shuffle(given)
        named = [
            one
            for bucket in Snapshot.from_tensors(given, bucket_bytes=bucket_bytes).buckets
            for one in bucket.tensors()
        ]
        cut = 7 * seed % len(named)
        assert pair.load(named[:cut], named[cut:]) == (SKIPPED if seed else sorted(name for name, _ in given))


def test_a_model_that_needs_no_tensor_is_not_called() -> None:
    """Some raise an error if they are not given all their tensors."""

    class Complete(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = parameter(2), parameter(3)

        def load_weights(self, named: Named) -> None:
            super().load_weights(named)
            assert self.seen == ["a", "b"]

    pair = Pair(Complete)
    for number in range(3):
        pair.plain.seen.clear()
        assert pair.load([("a", torch.full((2,), float(number))), ("b", torch.full((3,), float(number)))]) == (
            [] if number else ["a", "b"]
        )


class Made(Model):
    """Models that make something of "a" or of what it went to; "b" is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.a2 = parameter(4, 2), parameter(3), parameter(4, 2)


class Multiplied(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, 2 * tensor if name == "a" else tensor)


class Converted(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor.double() if name == "a" else tensor)


class Read(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            self.made = torch.full((1,), tensor[0, 0].item())
        super().load_one(name, tensor)


class Kept(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            self.made = tensor
        else:
            super().load_one(name, tensor)


class CopiedElsewhere(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            self.made = torch.empty(4, 2)
            self.made.copy_(tensor)
        super().load_one(name, tensor)


class Repeated(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor[:1] if name == "a" else tensor)


class AddedTo(Made):
    """1 + weight, as of norms of Gemma and Qwen3.5."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor)
        if name == "a":
            self.made = torch.empty(4, 2, dtype=torch.bfloat16)
            torch.add(self.a.data, 1.0, out=self.made)


class InPlace(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor)
        if name == "a":
            self.a.data[:2] *= 2


class Padded(Made):
    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor)
        if name == "a":
            self.a.data[3:].fill_(0)


class Absorbed(Made):
    """w_kc of kv_b_proj, as in DeepSeek: after the loop, from the parameter."""

    def load_weights(self, named: Named) -> None:
        super().load_weights(named)
        self.made = self.a.data.unflatten(0, (2, 2)).split([1, 1], dim=1)[0].transpose(1, 2).contiguous()


class InAThread(Made):
    """No mode sees what another thread does."""

    def load_weights(self, named: Named) -> None:
        with ThreadPoolExecutor(1) as threads:
            for name, tensor in named:
                self.seen.append(name)
                load = super().load_one
                threads.submit(load, name, tensor).result() if name == "a" else load(name, tensor)


MADE = [Multiplied, Converted, Read, Kept, CopiedElsewhere, Repeated, AddedTo, InPlace, Padded, Absorbed, InAThread]


@pytest.mark.parametrize("make", MADE)
def test_what_a_model_makes_of_a_tensor_or_its_parameter_is_made_anew(make: Callable[[], Model]) -> None:
    pair = Pair(make)
    for number, generator in enumerate(seeds()):
        given = {"a": torch.randn(4, 2, generator=generator), "b": torch.randn(3, generator=generator)}
        seen = pair.load(given.items())
        assert seen == (["a"] if number else ["a", "b"])


def test_tensors_that_are_joined_are_left_to_load_weights_both() -> None:
    """q_a_proj and kv_a_proj of DeepSeek: the first one waits for the second."""

    class Joined(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.other = parameter(5, 2), parameter(3)
            self.waiting: Weights = {}

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if name == "other":
                return super().load_one(name, tensor)
            self.waiting[name] = tensor
            if len(self.waiting) == 2:
                self.fused.data.copy_(torch.cat([self.waiting.pop("q_a"), self.waiting.pop("kv_a")]))
            return None

    pair = Pair(Joined)
    for number, order in enumerate(itertools.permutations(["q_a", "other", "kv_a"])):
        shapes = {"q_a": (2, 2), "other": (3,), "kv_a": (3, 2)}
        seen = pair.load([(name, torch.randn(shapes[name])) for name in order])
        assert seen == (["kv_a", "q_a"] if number else ["kv_a", "other", "q_a"])


def test_names_that_share_a_place_keep_their_order() -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.b = parameter(4, 2), parameter(3)

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one("embed" if name == "head" else name, tensor)

    pair = Pair(Shared)
    for number in range(4):
        given = [("embed", torch.randn(4, 2)), ("b", torch.randn(3)), ("head", torch.randn(4, 2))]
        assert pair.load(given[:: -1 if number % 2 else 1]) == (["embed", "head"] if number else ["b", "embed", "head"])


def test_tensors_that_share_memory_are_left_to_load_weights() -> None:
    def make() -> Model:
        made = Model()
        made.a, made.b, made.c = parameter(2), parameter(3), parameter(4)
        return made

    pair = Pair(make)
    for number in range(3):
        memory = torch.randn(9)
        given = [("a", memory[:2]), ("b", memory[1:4]), ("c", memory[4:8])]
        assert pair.load(given) == (["a", "b"] if number else ["a", "b", "c"])


def test_a_new_tensor_in_the_memory_of_an_older_one_is_not_taken_for_it() -> None:
    class Filled(Made):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if name == "a":
                super().load_one(name, torch.arange(3).repeat_interleave(3).view(3, 3)[:1, :1].expand(4, 2))
                self.b.data.copy_(torch.arange(3.0))  # of the size of the tensor that has just gone
            elif name == "a2":
                super().load_one(name, tensor)

    pair = Pair(Filled)
    for number in range(3):
        order = [("b", (3,)), ("a", (4, 2)), ("a2", (4, 2))]
        with pair.destinations.loading(pair.ours) as target:
            pair.ours.seen.clear()
            target.load_weights((name, torch.randn(shape)) for name, shape in order)
        assert torch.equal(pair.ours.b, torch.arange(3).bfloat16())
        assert sorted(pair.ours.seen) == (["a", "b"] if number else ["a", "a2", "b"])


A, B = ("a", torch.ones(4, 2)), ("b", torch.ones(3))
CHANGED: dict[str, Sequence[tuple[str, torch.Tensor]]] = {
    "dtype": [("a", torch.ones(4, 2, dtype=torch.float64)), B],
    "shape": [("a", torch.ones(1, 2)), B],
    "stride": [("a", torch.arange(8.0).view(2, 4).t()), B],
    "name": [A, ("a2", torch.ones(4, 2)), B],
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_name_or_layout_is_left_to_load_weights_and_learned(change: str) -> None:
    pair, other = Pair(Made), CHANGED[change]
    changed = "a2" if change == "name" else "a"
    assert pair.load([A, B]) == ["a", "b"]
    assert pair.load([A, B]) == []
    assert pair.load(other) == [changed]
    assert pair.load(other) == sorted(name for name, _ in other)
    repeated = ["a"] if change == "shape" else []  # it is smaller than its place
    assert pair.load([(name, 2 * tensor) for name, tensor in other]) == repeated


def test_a_name_that_was_missing_keeps_its_turn() -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = parameter(4, 2)

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one("embed", tensor)

    pair = Pair(Shared)
    pair.load([("embed", torch.randn(4, 2))])
    assert pair.load([("embed", torch.randn(4, 2)), ("head", torch.randn(4, 2))]) == ["head"]


def test_a_version_may_lack_a_name() -> None:
    pair = Pair(Made)
    pair.load([A, B])
    assert pair.load([("b", torch.zeros(3))]) == []
    assert pair.load([("a", torch.zeros(4, 2)), B]) == []


@pytest.mark.parametrize("move", [lambda old: old.clone(), lambda old: old.view(2, 4).view(4, 2).t().contiguous().t()])
def test_parameters_that_have_moved_are_found_again_and_their_memory_is_let_go(move: Any) -> None:
    pair = Pair(Made)
    pair.load([A, B])
    assert pair.load([A, B]) == []
    memory = weakref.ref(pair.ours.a.data.untyped_storage())
    pair.ours.a.data = move(pair.ours.a.data)
    assert pair.load([("a", torch.zeros(4, 2)), B]) == ["a", "b"]
    assert memory() is None
    assert pair.load([A, B]) == []


class Assigned(Made):
    """Moves with every load."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            self.a.data = tensor
        else:
            super().load_one(name, tensor)


def test_a_model_is_watched_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []

    class Recording(destinations._Recording):
        def __init__(self, model: Any) -> None:
            watched.append(model)
            super().__init__(model)

    monkeypatch.setattr(destinations, "_Recording", Recording)
    pair = Pair(Assigned)
    for _ in range(9):
        pair.load([("a", torch.randn(4, 2).bfloat16()), ("b", torch.randn(3))])
    assert len(watched) == 3


def test_a_model_that_makes_something_of_every_tensor_is_watched_once() -> None:
    class Doubled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a = parameter(2)

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one(name, 2 * tensor)

    pair = Pair(Doubled)
    for _ in range(2):
        assert pair.load([("a", torch.randn(2))]) == ["a"]
    with pair.destinations.loading(pair.ours) as target:
        assert target is pair.ours


def test_a_quantized_model_is_loaded_by_load_weights() -> None:
    def make() -> Model:
        made = Made()
        made.packed = parameter(2, dtype=torch.int32)
        return made

    pair = Pair(make)
    for _ in range(3):
        assert pair.load([A, B]) == ["a", "b"]


def test_few_tensors_wait_for_a_call_and_none_is_held_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(Model):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one(name, 2 * tensor if name == "p0" else tensor)

    monkeypatch.setattr(destinations, "_AT_ONCE_BYTES", 3 * 4)
    model, known = Doubled(), Destinations()
    for number in range(20):
        model.register_parameter(f"p{number}", parameter(1))
    at_once: list[int] = []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        given: list[StorageWeakRef] = []
        for number in range(20):
            tensor = torch.full((2,), float(number + 1))[:1]  # in a bucket
            given.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
            at_once.append(sum(not one.expired() for one in given))  # type: ignore[no-untyped-call]
            yield f"p{number}", tensor
            del tensor

    for _ in range(2):
        at_once.clear()
        with known.loading(model) as target:
            target.load_weights(named())
    assert len(model.seen) == 20 + 1
    assert max(at_once) == 3
    assert [float(one) for one in model.parameters()] == [2.0, *range(2, 21)]


@pytest.mark.parametrize("has_inference_mode", [False, True])
def test_a_server_may_load_in_inference_mode(has_inference_mode: bool) -> None:
    pair = Pair(Mixture)
    for number, generator in enumerate(seeds()):
        with torch.inference_mode(has_inference_mode):
            seen = pair.load(Mixture.given(generator).items())
        assert not number or seen == SKIPPED
