"""Convert a published folder, quantized or of a model type that transformers does not read so, into one to train."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
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
from asyncrl.data.model_folder import copy_all_but_weights, require_supported
from asyncrl.errors import ConfigError
from asyncrl.tensors import fp8, quantized_model
from tests.harness.families import make_tiny_family


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_tiny_family(folder, architecture="deepseek_v3")
    return folder


@pytest.fixture
def published(whole: Path, tmp_path: Path) -> Path:
    """The same model, published like Kimi-K2: FP8, its own model type, a matrix and its scales in different files."""
    folder = quantized_model.model_folder(whole, tmp_path / "published", "fp8").rename(tmp_path / "published")
    (tmp_path / ".published.lock").unlink()
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


def mimo(folder: Path) -> Path:
    """A tiny MiMo-7B as it is published: Qwen2 with a layer that predicts further tokens. Returns what it becomes."""
    text = make_tiny_family(folder / "text", architecture="qwen2")
    config = json.loads((text / "config.json").read_text())
    changes = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    further = {"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)}
    save(folder / "published", config | changes, load_file(text / "model.safetensors") | further, like=text)
    return text


def qwen3_5(folder: Path) -> Path:
    """A tiny Qwen3.5 as it is published: with eyes, and a layer's experts in two tensors. Returns its text part."""
    text = make_tiny_family(folder / "text", architecture="qwen3_5_moe")
    config, tensors = json.loads((text / "config.json").read_text()), load_file(text / "model.safetensors")
    inner = {key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")}
    inner["rope_parameters"]["mrope_section"] = [2, 0, 0]
    outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    eyes = {"model.visual.pos_embed.weight": torch.ones(4, 8), "mtp.norm.weight": torch.ones(64)}
    whole = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts"):
        both = [[tensors[f"{layer}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(8)]
        whole[f"{layer}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
        whole[f"{layer}.down_proj"] = torch.stack([tensors[f"{layer}.{e}.down_proj.weight"] for e in range(8)])
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in whole.items()}
    described = outer | {"text_config": inner, "vision_config": {}, "tie_word_embeddings": False}
    save(folder / "published", described, named | eyes, like=text)
    return text


def minimax_m2(folder: Path) -> Path:
    """A tiny MiniMax-M2 whose config.json has the rotated part of a head only under its engines' name."""
    text = make_tiny_family(folder / "text", architecture="minimax_m2")
    config = json.loads((text / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    save(folder / "published", config, load_file(text / "model.safetensors"), like=text)
    return text


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, like: Path) -> None:
    copy_all_but_weights(like, folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("publish", "is_needed"), [(mimo, True), (qwen3_5, False), (minimax_m2, True)])
def test_a_published_model_is_imported_as_the_one_that_transformers_reads(
    tmp_path: Path, publish: Callable[[Path], Path], is_needed: bool
) -> None:
    text = publish(tmp_path)
    with pytest.raises(ConfigError, match=r"import-model") if is_needed else contextlib.nullcontext():
        require_supported("model.path", tmp_path / "published")
        huggingface.read_shape(tmp_path / "published")
    num_parameters = import_folder(tmp_path / "published", tmp_path / "imported")
    original, imported = (load_file(folder / "model.safetensors") for folder in (text, tmp_path / "imported"))
    assert imported.keys() == original.keys()
    assert all(torch.equal(one, original[name]) for name, one in imported.items())
    assert num_parameters == sum(one.numel() for one in original.values())
    assert str(huggingface.read_shape(tmp_path / "imported")) == str(huggingface.read_shape(text))


@pytest.fixture
def in_four_bits(tmp_path: Path) -> Path:
    """A tiny gpt-oss as it is published: 4-bit experts, no dtype in config.json, scales in a file of their own."""
    folder = make_tiny_family(tmp_path / "gpt-oss", architecture="gpt_oss")
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
    assert transformers.AutoConfig.from_pretrained(tmp_path / "imported").dtype == torch.bfloat16
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
