"""Folders of quantized models: which weights are quantized, and that the folder says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.engines.validation import read_shapes
from asyncrl.tensors import fp8, quantized_model

ENDS = {"fp8": ("", "_scale_inv")}
"""What the names of the tensors that replace a matrix end in."""


@pytest.mark.parametrize("quantization", ENDS)
def test_matrices_of_layers_alone_are_quantized_and_the_folder_says_so(tmp_path: Path, quantization: str) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3_moe")
    made = quantized_model.model_folder(model, tmp_path / "made", quantization)
    before, after = load_file(model / "model.safetensors"), load_file(made / "model.safetensors")
    matrices = {name for name in before if name.endswith("_proj.weight")}
    kept = before.keys() - matrices
    assert after.keys() - kept == {name + end for name in matrices for end in ENDS[quantization]}
    assert all(torch.equal(after[name], before[name]) for name in kept)
    about = json.loads((made / "config.json").read_text())["quantization_config"]
    assert about == fp8.CONFIG
    assert quantized_model.find_format(after) == quantization
    assert quantized_model.find_format(before) == ""
    assert (made / "tokenizer.json").exists()
    assert read_shapes(made).keys() == after.keys()
    written = (made / "model.safetensors").stat().st_ino
    assert quantized_model.model_folder(model, tmp_path / "made", quantization) == made
    assert (made / "model.safetensors").stat().st_ino == written  # only once
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".made.lock"]


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
