"""The weight loader inside an SGLang server: each tensor arrives as written, however the file is cut."""

from __future__ import annotations

import base64
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engines.sglang import loader
from asyncrl.errors import WeightsError
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.snapshot import Bucket, Snapshot

CPU = torch.device("cpu")


def written(path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = {f"layer.{number}": torch.randn(5 + number, 7, generator=generator) for number in range(9)}
    given |= {f"half.{number}": torch.randn(3, 11, generator=generator).bfloat16() for number in range(5)}
    given |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "ids": torch.arange(6)}
    write(path, given)
    return given


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    snapshot = Snapshot.from_tensors(tensors.items())
    blocks = [bucket.data.numpy().tobytes() for bucket in snapshot.buckets]
    with path.open("wb") as stream:
        safetensors_file.write(stream, [safetensors_file.header(snapshot.entries), *blocks])


def decoded(instruction: str) -> list[tuple[str, torch.Tensor]]:
    """Decode an instruction as SGLang does."""
    return [(name, tensor.to(CPU)) for name, tensor in pickle.loads(base64.b64decode(instruction))]


def check_same(found: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(("piece_bytes", "bucket_bytes"), [(32 * 2**20, 2**29), (16, 200), (7, 1)])
def test_every_tensor_comes_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, bucket_bytes: int
) -> None:
    monkeypatch.setattr(loader, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(loader, "_BUCKET_BYTES", bucket_bytes)
    given = written(tmp_path / "w")
    check_same(dict(loader.tensors(tmp_path / "w", CPU)), given)


def test_at_most_three_buckets_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket that is read, one that is taken, and the previous one while the loop still holds its last tensor."""
    monkeypatch.setattr(loader, "_BUCKET_BYTES", 1)  # each tensor has its own bucket
    given = written(tmp_path / "w")
    made: list[weakref.ref[torch.Tensor]] = []
    at_once: list[int] = []

    class Counted(Bucket):
        @classmethod
        def empty(cls, *arguments: Any) -> Bucket:
            bucket = Bucket.empty(*arguments)
            made.append(weakref.ref(bucket.data))
            at_once.append(sum(data() is not None for data in made))
            return bucket

    monkeypatch.setattr(loader, "Bucket", Counted)
    count = 0
    for _name, _tensor in loader.tensors(tmp_path / "w", CPU):
        count += 1
    assert count == len(at_once) == len(given)
    assert max(at_once) <= 3


@pytest.mark.gpu
def test_a_gpu_gets_every_byte_while_the_model_still_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buckets reuse the same memory many times, and the model's copies are late."""
    monkeypatch.setattr(loader, "_PIECE_BYTES", 4 * 2**20)
    monkeypatch.setattr(loader, "_BUCKET_BYTES", 16 * 2**20)
    generator = torch.Generator().manual_seed(0)
    given = {f"layer.{number}": torch.randn(1024, 2048, generator=generator) for number in range(24)}
    write(tmp_path / "w", given)
    for _ in range(5):
        taken = {}
        for name, tensor in loader.tensors(tmp_path / "w", torch.device("cuda", 0)):
            torch.cuda._sleep(2_000_000)
            taken[name] = tensor.clone()
        check_same({name: tensor.cpu() for name, tensor in taken.items()}, given)


def test_a_file_that_ends_early_is_an_error_and_no_tensor_of_zeros(tmp_path: Path) -> None:
    file = tmp_path / "w"
    written(file)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(EOFError, match="bytes early"):
        dict(loader.tensors(file, CPU))


@pytest.mark.parametrize("first", ["w", "a descriptor that the server must not look at"])
def test_a_model_is_given_the_first_file_of_the_order_that_can_be_read(tmp_path: Path, first: str) -> None:
    given = written(tmp_path / "w")
    taken: dict[str, torch.Tensor] = {}

    class Network(torch.nn.Linear):
        def load_weights(self, weights: object) -> None:
            taken.update(weights)  # type: ignore[call-overload]

    loader.load(Network(1, 1), decoded(loader.serialize_files((tmp_path / first, tmp_path / "w"))))
    check_same(taken, given)


def test_a_second_version_is_copied_to_where_the_first_one_went(tmp_path: Path) -> None:
    class Network(torch.nn.Linear):
        calls = 0

        def load_weights(self, weights: Any) -> None:
            self.calls += 1
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    network = Network(3, 2)
    for version in (1, 2, 3):
        given = {"weight": version * torch.arange(6.0).view(2, 3), "bias": torch.full((2,), float(version))}
        write(tmp_path / "w", given)
        loader.load(network, decoded(loader.serialize_files((tmp_path / "w",))))
        check_same(dict(network.state_dict()), given)
    assert network.calls == 1


class Marlin:
    """Stands in for SGLang's scheme of experts in 4 bits (compressed_tensors_wNa16_moe.py): repacks weights in place,
    and makes indices and the workspace anew."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def restore_weights_before_loading(self, layer: Any) -> None:
        self.said.append("restore")
        layer.packed.resize_(4, 2)
        layer.is_marlin_converted = False

    def process_weights_after_loading(self, layer: Any) -> None:
        self.said.append("process")
        if getattr(layer, "is_marlin_converted", False):
            return
        repacked = layer.packed.t().clone()
        layer.packed.resize_(2, 4).copy_(repacked)
        layer.index = torch.nn.Parameter(torch.empty(2, 0), requires_grad=False)
        layer.workspace = torch.zeros(3)
        layer.is_marlin_converted = True


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Linear(1, 1), torch.nn.Module()
        self.experts.packed = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.int32), requires_grad=False)
        self.experts.scheme = self.scheme = Marlin()  # type: ignore[assignment]
        self.scheme.process_weights_after_loading(self.experts)

    def load_weights(self, weights: Any) -> None:
        self.scheme.said.append("load")
        for name, tensor in weights:
            self.get_parameter(name).data[:] = tensor  # into the shape that there is

    def held(self) -> dict[str, tuple[int, int, torch.Size]]:
        """Return what a CUDA graph may hold: objects, addresses, shapes."""
        tensors: dict[str, Any] = {**dict(self.named_parameters()), "workspace": self.experts.workspace}
        return {name: (id(one), one.data_ptr(), one.shape) for name, one in tensors.items()}


@pytest.mark.parametrize("has_sessions", [False, True])
def test_repacked_experts_are_loaded_again_into_the_memory_that_graphs_read(tmp_path: Path, has_sessions: bool) -> None:
    model = Mixture()
    experts, scheme = model.experts, model.scheme
    before = model.held(), experts.workspace, experts.index  # referred to, so that no id or address is taken again
    for version in (1, 2):
        given = version * torch.arange(8, dtype=torch.int32).view(4, 2)
        write(tmp_path / "w", {"experts.packed": given})
        scheme.said.clear()
        if has_sessions:  # SGLang 0.5.23 restores when one begins, and processes when it ends
            scheme.restore_weights_before_loading(experts)
        loader.load(model, decoded(loader.serialize_files((tmp_path / "w",))))
        if has_sessions:
            scheme.process_weights_after_loading(experts)
        own = ["restore", "load", "process"]
        assert scheme.said == (["restore", *own, "process"] if has_sessions else own)
        assert torch.equal(experts.packed, given.t())  # type: ignore[arg-type]
        assert model.held() == before[0]


def source(payload: bytes, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight channel's source: the tensors of the file that the payload names."""
    return loader.tensors(Path(payload.decode()), device)


def from_source(tmp_path: Path, *, expected: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the tensors that a model receives from an instruction to load the output of ``source``."""
    taken: dict[str, torch.Tensor] = {}

    class Network(torch.nn.Linear):
        def load_weights(self, weights: object) -> None:
            taken.update(weights)  # type: ignore[call-overload]

    payload = str(tmp_path / "w").encode()
    instruction = loader.serialize_source(source, payload, expected=expected, optional=frozenset({"tied"}))
    loader.load(Network(1, 1), decoded(instruction))
    return taken


def test_a_function_that_yields_another_models_tensors_is_an_error(tmp_path: Path) -> None:
    given = written(tmp_path / "w")
    expected = {name: tuple(tensor.shape) for name, tensor in given.items()} | {"another": (3,)}
    with pytest.raises(WeightsError, match="test_loader:source: another is missing"):
        from_source(tmp_path, expected=expected)
