"""Weights in 8 and 4 bits: the rounding of fp8, and the folders that engines get."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.validation import read_shapes
from asyncrl.tensors import fp8, quantized_model

ENDS = {
    "fp8": ("", "_scale_inv"),
    "fp8_ue8m0": ("", "_scale_inv"),
    "int4_group32": ("_packed", "_scale", "_shape"),
}
"""What the names of the tensors that replace a matrix end in."""


@pytest.mark.parametrize("quantization", ENDS)
def test_matrices_of_layers_alone_are_quantized_and_the_folder_says_so(tmp_path: Path, quantization: str) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3_moe")
    made = quantized_model.model_folder(model, tmp_path / "made", quantization)
    before, after = load_file(model / "model.safetensors"), load_file(made / "model.safetensors")
    of_experts = ".experts." if quantization == "int4_group32" else ""
    matrices = {name for name in before if name.endswith("_proj.weight") and of_experts in name}
    kept = before.keys() - matrices
    assert after.keys() - kept == {name + end for name in matrices for end in ENDS[quantization]}
    assert all(torch.equal(after[name], before[name]) for name in kept)
    about = json.loads((made / "config.json").read_text())["quantization_config"]
    if quantization == "int4_group32":
        assert about["config_groups"]["group_0"]["weights"]["group_size"] == 32
    else:
        assert about == fp8.CONFIG | ({"scale_fmt": "ue8m0"} if quantization == "fp8_ue8m0" else {})
    assert quantized_model.are_quantized(after)
    assert not quantized_model.are_quantized(before)
    assert (made / "tokenizer.json").exists()
    assert read_shapes(made).keys() == after.keys()
    written = (made / "model.safetensors").stat().st_ino
    assert quantized_model.model_folder(model, tmp_path / "made", quantization) == made
    assert (made / "model.safetensors").stat().st_ino == written  # only once
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".made.lock"]


@pytest.mark.parametrize("quantization", ["", *ENDS])
def test_bytes_of_a_format_are_those_of_its_tensors(quantization: str) -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 256),
        "model.layers.0.self_attn.q_proj.weight": (200, 256),
        "model.layers.0.mlp.experts.0.down_proj.weight": (256, 128),
        "model.layers.0.input_layernorm.weight": (256,),
    }
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    made = quantized_model.quantize_tensors(tensors.items(), quantization)
    found = sum(tensor.nbytes for name, tensor in made if not name.endswith("_shape"))
    assert quantized_model.count_bytes(shapes, quantization, width=2) == found


def test_modules_that_a_version_in_4_bits_ignores_are_all_but_routed_experts() -> None:
    """Names of Kimi-K2-Thinking, whose config.json ignores the same ones one by one; SGLang matches as re.match."""
    (pattern,) = quantized_model.config("int4_group32")["ignore"]
    layer = "model.layers.1"
    for name in ("self_attn.kv_b_proj", "mlp.gate", "mlp.shared_experts.up_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert re.match(pattern.removeprefix("re:"), f"{layer}.{name}")
    assert re.match(pattern.removeprefix("re:"), "lm_head")
    assert not re.match(pattern.removeprefix("re:"), f"{layer}.mlp.experts.0.gate_proj")


def test_another_model_has_another_folder_and_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """A server may read the first model's while `asyncrl evaluate` makes one for the second."""
    matrix = "model.layers.0.self_attn.q_proj.weight"
    (tmp_path / ".made.tmp").mkdir()
    for value in (1.0, 2.0, 1.0):
        model = tmp_path / str(value)
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        save_file({matrix: torch.full((128, 128), value, dtype=torch.bfloat16)}, model / "model.safetensors")
        made = load_file(quantized_model.model_folder(model, tmp_path / "made", "fp8") / "model.safetensors")
        assert fp8.dequantize(made[matrix], made[f"{matrix}_scale_inv"])[0, 0].item() == pytest.approx(value, rel=0.1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".made.lock"]
    assert len(list(tmp_path.glob("made-*"))) == 2


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
    matrix[0, 0] = 450.0  # 450 / 448 is rounded up to 2, 1 / 64 is a power of two
    weight, scale = fp8.quantize(matrix, has_round_scales=True)
    assert scale.tolist() == [[2.0], [0.015625]]
    assert [weight[0, 0].float(), weight[1, 1].float(), weight[200, 7].float()] == [224.0, 1.5, -448.0]


def test_quantizing_twice_changes_nothing() -> None:
    weight, scale = fp8.quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
    again, same = fp8.quantize(dequantized(weight, scale))
    assert torch.equal(weight.float(), again.float())
    torch.testing.assert_close(scale, same)
