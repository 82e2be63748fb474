"""Repacked layers: after an update they hold what a start from the same weights would give, at the same addresses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engines.sglang import loader, repacking
from tests.unit.engines.sglang.test_loader import ordered, write


@dataclass
class Kernel:
    """SGLang's MarlinLinearLayerConfig, as far as we read it."""

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    act_type: torch.dtype


class Loadable(torch.nn.Parameter):
    """A parameter in the folder's layout, which knows its loader."""

    def __new__(cls, data: torch.Tensor, weight_loader: Any) -> Loadable:
        made = super().__new__(cls, data, requires_grad=False)
        made.weight_loader = weight_loader
        return made


class Scheme:
    """SGLang's CompressedTensorsWNA16: transposes and reverses instead of the order of Marlin's kernels."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        *,
        input_size: int,
        output_size: int,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        inputs, outputs = input_size_per_partition, sum(output_partition_sizes)
        self.kernel_config = Kernel((input_size, output_size), (inputs, outputs), params_dtype)
        for name, shape, dtype in (
            ("weight_packed", (outputs, inputs // 8), torch.int32),
            ("weight_scale", (outputs, inputs // 32), params_dtype),
            ("weight_shape", (2,), torch.int64),
        ):
            layer.register_parameter(name, Loadable(torch.empty(shape, dtype=dtype), weight_loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        self.workspace = torch.zeros(4)
        for name in ("weight_packed", "weight_scale"):
            old = getattr(layer, name)
            assert isinstance(old, Loadable)  # SGLang asserts the same
            made = old.data.t().contiguous().flip(0)
            layer.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))
        layer.weight_g_idx = torch.nn.Parameter(torch.empty(0, dtype=torch.int32), requires_grad=False)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scheme = Scheme()
        self.bias = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
        self.scheme.create_weights(
            self,
            input_size=128,
            output_size=64,
            input_size_per_partition=64,
            output_partition_sizes=[32, 32],
            params_dtype=torch.bfloat16,
            weight_loader=lambda parameter, tensor: parameter.data.copy_(tensor),
        )


class Network(torch.nn.Module):
    """A started server's model: two layers that it repacked, and a norm."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.norm = torch.nn.Parameter(torch.ones(64), requires_grad=False)
        self.load_weights(weights.items())
        for layer in self.layers:
            layer.scheme.process_weights_after_loading(layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            given = getattr(parameters[name], "weight_loader", None)
            if given is None:
                assert parameters[name].shape == tensor.shape
                parameters[name].data.copy_(tensor)
            else:
                given(parameters[name], tensor)

    def state(self) -> dict[str, list[float]]:
        return {name: parameter.tolist() for name, parameter in self.named_parameters()}

    def places(self) -> dict[str, tuple[int, int]]:
        return {name: (id(parameter), parameter.data_ptr()) for name, parameter in self.named_parameters()}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {"norm": torch.randn(64, generator=generator)}
    for number in range(2):
        name = f"layers.{number}.weight"
        made[f"{name}_packed"] = torch.randint(-(2**31), 2**31, (64, 8), dtype=torch.int32, generator=generator)
        made[f"{name}_scale"] = torch.randn(64, 2, generator=generator).bfloat16()
        made[f"{name}_shape"] = torch.tensor([64, 128])
        made[f"layers.{number}.bias"] = torch.randn(64, generator=generator)
    return made


def test_sglang_alone_cannot_load_such_a_layer_twice() -> None:
    with pytest.raises(AssertionError):
        Network(weights(0)).load_weights(weights(1).items())


def test_an_update_gives_what_a_start_from_the_same_weights_gives(tmp_path: Path) -> None:
    served = Network(weights(0))
    places, workspaces = served.places(), [layer.scheme.workspace for layer in served.layers]
    for seed in (1, 2):
        write(tmp_path / "w", weights(seed))
        loader.load(served, ordered(loader.serialized((tmp_path / "w",))))
        assert served.state() == Network(weights(seed)).state()
    assert served.places() == places  # CUDA graphs read what they were captured with
    assert all(layer.scheme.workspace is one for layer, one in zip(served.layers, workspaces, strict=True))


def test_tensors_that_the_server_receives_itself_come_between_two_orders() -> None:
    served = Network(weights(0))
    places = served.places()
    loader.load(served, ordered(loader.serialized_step(loader.UNPACK)))
    for item in weights(1).items():  # in several buckets
        served.load_weights([item])
    loader.load(served, ordered(loader.serialized_step(loader.PACK)))
    assert served.state() == Network(weights(1)).state()
    assert served.places() == places


def test_an_update_that_broke_off_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    served = Network(weights(0))
    loader.load(served, ordered(loader.serialized_step(loader.UNPACK)))
    served.load_weights(list(weights(1).items())[:2])
    write(tmp_path / "w", weights(2))
    loader.load(served, ordered(loader.serialized((tmp_path / "w",))))
    assert served.state() == Network(weights(2)).state()


def test_an_update_needs_no_second_copy_of_the_weights() -> None:
    served = Network(weights(0))
    before = {name: parameter.data_ptr() for name, parameter in served.named_parameters() if parameter.numel()}
    repacking.unpack(served)
    assert {name: parameter.data_ptr() for name, parameter in served.named_parameters() if parameter.numel()} == before
    assert served.layers[0].weight_packed.shape == (64, 8)  # the folder's layout
