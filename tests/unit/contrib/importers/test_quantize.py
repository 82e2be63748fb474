"""`asyncrl quantize`: a folder in FP8 or INT4 that engines load, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.backends import huggingface
from asyncrl.cli.main import main
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.tensors import fp8, int4
from asyncrl.tensors.adapter_names import module_name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("whole"), architecture="qwen3_moe", hidden_size=64)


def test_numbers_of_four_bits_are_worked_by_hand() -> None:
    # The largest magnitude of the first eight numbers is 7.5: their scale is 1, and 7.5 rounds to 8, which is cut to 7.
    # Packed: number + 8, the first in the lowest bits. Of the second eight, all 0, the scale is 0.
    matrix = torch.tensor([[7.5, -7.5, 0.4, -0.6, 1.0, 2.0, -3.0, 0.0, *[0.0] * 8]])
    packed, scale = int4.quantize(matrix, group=8)
    assert scale.tolist() == [[1.0, 0.0]]
    numbers = [7, -8, 0, -1, 1, 2, -3, 0]
    word = sum((number + 8) << (4 * place) for place, number in enumerate(numbers))
    assert [one & 0xFFFFFFFF for one in packed[0].tolist()] == [word, 0x88888888]
    assert int4.dequantize(packed, scale, columns=16).tolist() == [[*map(float, numbers), *[0.0] * 8]]


def test_packed_numbers_are_those_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    utils = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    matrix = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    about = quantization.QuantizationConfig.model_validate(int4.config(["lm_head"], group=32))
    arguments = about.config_groups["group_0"].weights
    groups = matrix.view(6, -1, 32)
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    numbers = quantization.quantize(matrix, scale, zero, arguments, dtype=torch.int8)
    packed, ours = int4.quantize(matrix, group=32)
    assert torch.equal(ours, scale)
    assert torch.equal(packed, helpers.pack_to_int32(numbers, 4))


@pytest.mark.parametrize("kind", ["fp8", "fp8_ue8m0", "int4"])
def test_a_quantized_folder_comes_back_close_to_the_whole_one(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    group = ["--group", "32"] if kind == "int4" else []
    assert main(["quantize", str(whole), str(tmp_path / kind), "--format", kind, *group]) == 0
    assert capsys.readouterr().out == f'model.path = "{tmp_path / kind}"\n'
    about: dict[str, Any] = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
    stored = load_file(tmp_path / kind / "model.safetensors")
    original = load_file(whole / "model.safetensors")
    matrices = {name for name in original if module_name(name) and original[name].ndim == 2}
    assert len(matrices) > 50  # attention and experts
    if kind != "int4":
        assert about == fp8.config(kind)
        assert {name for name, one in stored.items() if one.dtype == torch.float8_e4m3fn} == matrices
    else:
        assert {int4.whole_name(name) for name in stored if int4.is_packed(name)} == matrices
        assert set(about["ignore"]) == {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert main(["import-model", str(tmp_path / kind), str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        if name in matrices:
            largest = float(tensor.abs().max())
            error = float((back[name].float() - tensor.float()).abs().max())
            assert 0 < error <= largest * (1 / 14 if kind == "int4" else 2**-4)
        else:
            assert torch.equal(back[name].float(), tensor.float()), name
    assert str(huggingface.read_shape(tmp_path / "back").num_layers) == "2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--format", "int4"],
            "32 columns are no multiple of the 128 numbers that share a scale; use a smaller --group",
        ),
        (["--format", "fp8", "--group", "32"], "--group is for int4"),
    ],
)
def test_what_cannot_be_quantized_is_one_line_and_leaves_nothing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["quantize", str(whole), str(tmp_path / "made"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_folder_is_not_quantized_again(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(whole), str(tmp_path / "made"), "--format", "fp8"]) == 0
    assert main(["quantize", str(tmp_path / "made"), str(tmp_path / "again"), "--format", "fp8"]) == 2
    assert "quantized already; `asyncrl import-model` makes 16-bit ones" in capsys.readouterr().err
    config = tmp_path / "made" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": None}))
    assert main(["quantize", str(tmp_path / "made"), str(tmp_path / "again"), "--format", "fp8"]) == 2
    assert "weight_scale_inv, so its weights are quantized, although config.json" in capsys.readouterr().err
