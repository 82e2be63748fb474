"""8-bit weights: their values, their distance from the original, and which weights are quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.validation import read_shapes
from asyncrl.tensors import fp8


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return f32[R, C]: each element times the scale of its block."""
    rows, columns = weight.shape
    each = scale.repeat_interleave(fp8.BLOCK, 0).repeat_interleave(fp8.BLOCK, 1)
    return weight.float() * each[:rows, :columns]


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (200, 300), (3, 5)])
def test_a_matrix_is_off_by_no_more_than_e4m3_rounds(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix[0] *= 50  # gives the blocks different scales
    weight, scale = fp8.quantize(matrix)
    assert (weight.dtype, weight.shape) == (torch.float8_e4m3fn, matrix.shape)
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, tuple(-(-size // 128) for size in shape))
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of a normal number, and 2^-10 scales below 2^-6 scales.
    bound = torch.maximum(matrix.abs() / 16, whole / 1024) * (1 + 1e-5)
    assert ((dequantized(weight, scale) - matrix).abs() <= bound).all()


def test_scales_are_worked_by_hand() -> None:
    matrix = torch.zeros(256, 128)
    matrix[0, 0], matrix[1, 1], matrix[200, 7] = 448.0, 3.0, -7.0  # 448 / 448 = 1, 7 / 448 = 1/64
    weight, scale = fp8.quantize(matrix)
    assert scale.tolist() == [[1.0], [0.015625]]
    assert [weight[0, 0].float(), weight[1, 1].float(), weight[200, 7].float()] == [448.0, 3.0, -448.0]
    assert fp8.quantize(torch.zeros(128, 128))[1].tolist() == [[1.0]]  # no 0 / 0


def test_what_was_quantized_once_stays_as_it_is() -> None:
    weight, scale = fp8.quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
    again, same = fp8.quantize(dequantized(weight, scale))
    assert torch.equal(weight.float(), again.float())
    torch.testing.assert_close(scale, same)


def test_matrices_of_layers_alone_are_quantized_and_the_folder_says_so(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3_moe")
    made = fp8.model_folder(model, tmp_path / "made")
    before, after = load_file(model / "model.safetensors"), load_file(made / "model.safetensors")
    halved = {name for name in before if name.endswith("_proj.weight")}
    assert {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn} == halved
    assert after.keys() - before.keys() == {f"{name}_scale_inv" for name in halved}
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - halved)
    assert json.loads((made / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]
    assert (made / "tokenizer.json").exists()
    assert read_shapes(made).keys() == after.keys()
    assert fp8.model_folder(Path("nowhere"), tmp_path / "made") == made  # written only once
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_weights_that_the_index_does_not_name_are_not_quantized(tmp_path: Path) -> None:
    """Mistral's folders hold the weights a second time, by other names; engines would wait for those tensors."""
    model = make_tiny_model(tmp_path / "model", architecture="mistral")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    parts: dict[str, dict[str, torch.Tensor]]
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        list(parts.values())[number % 2][name] = tensor
    for file, part in parts.items():
        save_file(part, model / file)
    files = {name: file for file, part in parts.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, model / "consolidated.safetensors")
    made = fp8.model_folder(model, tmp_path / "made")
    assert {path.name for path in made.glob("*.safetensors")} == set(parts)
    assert read_shapes(made).keys() == {name for name, _ in fp8.quantized(tensors.items())}
