"""Convert a folder in FP8 or MXFP4, or with a model type that needs its own code, into a folder that can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from asyncrl.backends import huggingface
from asyncrl.cli.main import main
from asyncrl.contrib.importers import mxfp4
from asyncrl.contrib.importers.quantized_folder import import_folder
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, quantized_model

KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""As published, without entries that no model code reads."""


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""gpt-oss-20b as published, without its quantization_config and entries that no model code reads. It names no dtype."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_tiny_model(folder, architecture="deepseek_v3")
    return folder


@pytest.fixture
def published(whole: Path, tmp_path: Path) -> Path:
    """The same model, published like Kimi-K2: FP8, its own model type, a matrix and its scales in different files."""
    folder = quantized_model.model_folder(whole, tmp_path / "published", "fp8").rename(tmp_path / "published")
    describe(folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number in (1, 2):
        part = {name: one for name, one in tensors.items() if fp8.is_scale(name) == (number == 2)}
        save_file(part, folder / f"model-{number}-of-2.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(part, f"model-{number}-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def describe(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_an_imported_folder_has_the_weights_in_bfloat16_and_can_be_trained(
    whole: Path, published: Path, tmp_path: Path
) -> None:
    num_parameters = import_folder(published, tmp_path / "imported")
    original = load_file(whole / "model.safetensors")
    imported = load_file(tmp_path / "imported" / "model-1-of-2.safetensors")
    assert imported.keys() == original.keys()
    assert num_parameters == sum(one.numel() for one in original.values())
    for name, one in imported.items():
        assert one.shape == original[name].shape
        largest = original[name].abs().max()
        assert torch.allclose(one.float(), original[name].float(), rtol=2**-4 + 2**-8, atol=float(largest) / 2**10)
    assert str(huggingface.read_shape(tmp_path / "imported")) == str(huggingface.read_shape(whole))
    assert sorted(huggingface.weight_names(tmp_path / "imported")) == sorted(original)


def test_a_folder_in_fp8_is_refused_where_it_is_trained_with_what_mends_it(published: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantized weights .*fp8.*`asyncrl import-model .* NEW_FOLDER`"):
        huggingface.read_shape(published)


def test_a_model_type_of_its_own_code_is_refused_with_what_mends_it_and_imported(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "of-its-own"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    describe(folder, model_type="kimi_k2")
    with pytest.raises(ConfigError, match=r"own code.*`asyncrl import-model"):
        huggingface.read_shape(folder)
    import_folder(folder, tmp_path / "imported")
    assert str(huggingface.read_shape(tmp_path / "imported")) == str(huggingface.read_shape(whole))


def test_kimi_k2_has_the_shape_that_is_published(tmp_path: Path) -> None:
    described = {key: value for key, value in KIMI_K2.items() if key not in ("auto_map", "quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(described | {"model_type": "deepseek_v3"}))
    shape = huggingface.read_shape(tmp_path)
    assert shape.experts is not None and shape.latent is not None
    assert (shape.num_layers, shape.hidden_size, shape.vocabulary_size) == (61, 7168, 163840)
    assert (shape.experts.num_experts, shape.experts.experts_per_token) == (384, 8)
    assert shape.latent.score_scale == pytest.approx(1.8133, abs=1e-4)  # (0.1 ln 32 + 1)^2


def test_gpt_oss_has_the_shape_that_is_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    shape = huggingface.read_shape(tmp_path)
    assert shape.experts is not None and shape.local is not None
    assert (shape.num_layers, shape.hidden_size, shape.vocabulary_size) == (24, 2880, 201088)
    assert (shape.experts.num_experts, shape.experts.experts_per_token) == (32, 4)
    assert [shape.window(layer) for layer in range(4)] == [128, 0, 128, 0]
    assert shape.rope_scale == pytest.approx(1.3466, abs=1e-4)  # 0.1 ln 32 + 1


@pytest.fixture
def in_four_bits(tmp_path: Path) -> Path:
    """A tiny gpt-oss as it is published: 4-bit experts, no dtype in config.json, scales in a file of their own."""
    folder = make_tiny_model(tmp_path / "gpt-oss", architecture="gpt_oss")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    random, files = torch.Generator().manual_seed(0), {"model-1-of-2": {}, "model-2-of-2": {}}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files["model-1-of-2"][name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        blocks = (experts, outputs, inputs // mxfp4.GROUP, mxfp4.GROUP // 2)
        files["model-1-of-2"][f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=random, dtype=torch.uint8)
        scales = torch.randint(118, 126, blocks[:3], generator=random, dtype=torch.uint8)
        files["model-2-of-2"][f"{name}_scales"] = scales
    (folder / "model.safetensors").unlink()
    index = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_a_folder_with_experts_in_four_bits_is_imported_as_transformers_reads_it(
    in_four_bits: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"quantized weights .*mxfp4.*`asyncrl import-model .* NEW_FOLDER`"):
        huggingface.read_shape(in_four_bits)
    import_folder(in_four_bits, tmp_path / "imported")
    published = {k: v for n in (1, 2) for k, v in load_file(in_four_bits / f"model-{n}-of-2.safetensors").items()}
    imported = load_file(tmp_path / "imported" / "model-1-of-2.safetensors")
    assert {one.dtype for one in imported.values()} == {torch.bfloat16}
    for name, tensor in imported.items():
        blocks = published.get(f"{name}_blocks")
        if blocks is None:
            assert torch.equal(tensor, published[name])
        else:
            assert torch.equal(tensor, convert_moe_packed_tensors(blocks, published[f"{name}_scales"]))
    assert huggingface.read_shape(tmp_path / "imported").dtype == torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "imported")
    loaded = {name for name in model.state_dict() if not name.endswith("inv_freq")}
    assert loaded == imported.keys()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"awq.*use the unquantized model"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"weight_block_size None"),
        ({"quantization_config": None, "model_type": "deepseek_v3"}, r"nothing to import"),
    ],
)
def test_unsupported_import_is_refused_in_one_line_and_leaves_nothing(
    published: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    describe(published, **changes)
    with pytest.raises(ConfigError, match=says) as caught:
        import_folder(published, tmp_path / "imported")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_the_command_imports_a_folder_and_says_what_is_wrong_with_one(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-model", str(published), str(tmp_path / "imported")]) == 0
    assert main(["import-model", str(published), str(tmp_path / "imported")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["import-model", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_scales_that_are_missing_or_of_another_matrix_are_one_line(published: Path, tmp_path: Path) -> None:
    scales = load_file(published / "model-2-of-2.safetensors")
    name = next(iter(scales))
    save_file(scales | {name: torch.ones(7, 7)}, published / "model-2-of-2.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model-1-of-2.safetensors: .*: scales of .* are \(7, 7\)"):
        import_folder(published, tmp_path / "imported")
    index = json.loads((published / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="has no weight .*_scale_inv"):
        import_folder(published, tmp_path / "imported")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
