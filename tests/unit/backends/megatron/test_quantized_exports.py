"""Exports for quantized engines: the learner's own weights in the format of weights.quantization."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.huggingface import read_shape
from asyncrl.backends.megatron.refusals import require_quantizable
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, quantized_model
from tests.harness import config_only
from tests.harness.backends import LEARNING_RATE, RANKS, sequences, shares, started, tiny_model, weights


@pytest.mark.parametrize("quantization", ["fp8"])
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("megatron-1", "qwen3"),
        ("megatron-1", "qwen3_moe"),
        ("megatron-1", "deepseek_v3"),
        pytest.param("megatron-tp2", "qwen3", marks=RANKS),
        pytest.param("megatron-ep2", "qwen3_moe", marks=RANKS),
    ],
)
def test_engines_get_the_trained_weights_in_their_format(
    kind: str, architecture: str, tmp_path: Path, quantization: str
) -> None:
    """With tensor parallelism a matrix is gathered first: its blocks are those of the whole matrix. Each expert's are
    its own."""
    folder, made = tiny_model(tmp_path / "model", architecture=architecture, hidden_size=128), {}
    for wanted in ("", quantization):
        with started(kind, folder, quantization=wanted) as backend:
            backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
            made[wanted] = weights(backend)
    assert any(not torch.equal(one, made[""][name]) for name, one in load_file(folder / "model.safetensors").items())
    expected = dict(quantized_model.quantize_tensors(made[""].items(), quantization))
    assert made[quantization].keys() == expected.keys()
    for name, one in expected.items():
        assert made[quantization][name].dtype == one.dtype
        assert torch.equal(made[quantization][name].view(torch.uint8), one.contiguous().view(torch.uint8)), name
    whole = {name for name in made[""] if f"{name}_scale_inv" not in made[quantization]}
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # and nothing else, as in the published FP8 models
    assert all(any(word in name for word in kept) for name in whole), whole


def test_a_published_fp8_model_has_scales_where_the_exports_have_them() -> None:
    """Names of DeepSeek-V3's first mixed layer (model.safetensors.index.json of deepseek-ai/DeepSeek-V3)."""
    layer = "model.layers.3"
    matrices = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    names = [f"{layer}.self_attn.{name}.weight" for name in matrices]
    names += [f"{layer}.mlp.experts.255.{name}_proj.weight" for name in ("gate", "up", "down")]
    names += [f"{layer}.mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    others = [f"{layer}.mlp.gate.weight", f"{layer}.self_attn.q_a_layernorm.weight", "model.embed_tokens.weight"]
    made = dict(fp8.quantize_tensors((name, torch.ones(130, 128)) for name in (*names, *others)))
    assert [name for name in made if fp8.is_scale(name)] == [f"{name}_scale_inv" for name in names]
    assert made[f"{names[0]}_scale_inv"].shape == (2, 1)


@pytest.mark.parametrize(
    ("quantization", "architecture", "problem"),
    [
        ("fp8", "qwen3", "blocks of 128 numbers, and hidden_size is 64; remove it"),
        ("fp8", "qwen3_moe", "blocks of 128 numbers, and hidden_size is 64; remove it"),
        ("fp8", "gpt_oss", "the experts of a layer are one tensor in this model; remove it"),
        ("int4", "qwen3_moe", 'groups of 128 numbers, and hidden_size is 64; use "int4_group32"'),
        ("int4_group32", "qwen3", "is for routed experts, and the model has none"),
        ("int4_group32", "gpt_oss", "the experts of a layer are one tensor in this model; remove it"),
    ],
)
def test_model_whose_matrices_have_no_blocks_is_refused(
    tmp_path: Path, quantization: str, architecture: str, problem: str
) -> None:
    shape: ModelShape = read_shape(tiny_model(tmp_path, architecture=architecture))
    with pytest.raises(ConfigError, match=f'weights.quantization: "{quantization}" .*{problem}') as caught:
        require_quantizable(shape, quantization)
    assert "\n" not in str(caught.value)


def test_models_of_real_sizes_are_taken(tmp_path: Path) -> None:
    shape = read_shape(config_only.write("Qwen3-30B-A3B", tmp_path / "model"))
    for quantization in ("fp8", "int4", "int4_group32"):
        require_quantizable(shape, quantization, ranks=2)
    assert shape.experts is not None
    narrow = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, feed_forward_size=704))
    with pytest.raises(ConfigError, match="blocks of 128 numbers, and moe_intermediate_size is 704"):
        require_quantizable(narrow, "fp8")
    with pytest.raises(ConfigError, match='moe_intermediate_size is 704; use "int4_group32"'):
        require_quantizable(narrow, "int4")
    with pytest.raises(ConfigError, match="is 704, shared by expert_tensor_parallel = 4 ranks; remove it"):
        require_quantizable(narrow, "int4_group32", ranks=4)  # 176 = 5.5 x 32
