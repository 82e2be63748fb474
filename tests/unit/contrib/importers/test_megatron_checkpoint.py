"""Converting a Hugging Face folder to a Megatron checkpoint and back gives the same folder, for every family."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.actors.learner import manifest
from asyncrl.backends.families.table import FAMILIES
from asyncrl.cli.main import main
from asyncrl.contrib.importers import megatron_checkpoint
from asyncrl.contrib.importers.megatron_checkpoint import convert
from asyncrl.data.tiny_vision_model import VisionArchitecture
from asyncrl.errors import ConfigError
from asyncrl.tensors import torch_dist
from asyncrl.tensors.torch_dist import Chunk, TorchDist
from tests.harness.families import ARCHITECTURES, make_tiny_family


def made(folder: Path, architecture: str = "qwen3_moe", *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model in bfloat16, with the router's bias in float32."""
    make_tiny_family(folder, architecture=architecture, tie_word_embeddings=architecture == "qwen2")
    path = folder / "model.safetensors"
    tensors = {
        name: one if name.endswith("e_score_correction_bias") else one.to(dtype)
        for name, one in load_file(path).items()
    }
    safetensors_torch_save(tensors, path)
    return folder


def safetensors_torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def assert_same(first: Path, second: Path) -> None:
    """Compare the weights bit for bit, and all other files."""
    here, there = (
        {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        for folder in (first, second)
    )
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert tensor.dtype == there[name].dtype, name
        assert torch.equal(tensor, there[name]), name
    for path in first.iterdir():
        if not path.name.startswith("model"):
            assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_all_families_but_those_that_read_images_are_converted() -> None:
    assert len(ARCHITECTURES) == len(FAMILIES) - len(get_args(VisionArchitecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_converting_there_and_back_restores_the_folder(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_checkpoint, "FILE_BYTES", 20_000)  # makes several files
    folder = made(tmp_path / "model", architecture)
    there = convert(folder, tmp_path / "megatron")
    back = convert(tmp_path / "megatron", tmp_path / "back")
    assert there.left_out == back.left_out == ()
    assert_same(folder, tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def test_reads_a_checkpoint_of_megatron(tmp_path: Path) -> None:
    """Megatron stacks layers in one tensor, names norms after its own layers, and pads the vocabulary."""
    folder = made(tmp_path / "model", "qwen3")
    convert(folder, tmp_path / "ours")
    ours, chunks = TorchDist(tmp_path / "ours" / "release"), []
    for key in ours.keys():  # noqa: SIM118
        tensor, (layer, rest) = ours.read(key), key_of_layer(key)
        if "word_embeddings" in key:
            tensor = torch.cat([tensor, torch.zeros(14, tensor.shape[1], dtype=tensor.dtype)])
        if layer >= 0:
            rest = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"}.get(rest, rest)
            start, whole = (layer, *[0] * tensor.ndim), (2, *tensor.shape)
            chunks.append(Chunk(key=f"decoder.layers.{rest}", whole=whole, start=start, data=tensor[None]))
        else:
            chunks.append(Chunk(key=key, whole=tuple(tensor.shape), start=(0,) * tensor.ndim, data=tensor))
    theirs = tmp_path / "theirs" / "iter_0000050"
    theirs.mkdir(parents=True)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("50\n")
    torch_dist.complete(theirs, torch_dist.write_chunks(theirs / "__0_0.distcp", chunks)[0])
    assert convert(tmp_path / "theirs", tmp_path / "back", model=folder).padding == 14
    assert_same(folder, tmp_path / "back")
    fewer = edited(folder, tmp_path / "fewer", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match=r"has the size \[2, 64\], the model's num_hidden_layers is 1; is it"):
        convert(tmp_path / "theirs", tmp_path / "x", model=fewer)


def edited(model: Path, folder: Path, **changes: object) -> Path:
    """Copy the folder ``model`` with changes to its config.json."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "from_folder", "from_checkpoint"),
    [
        ({"num_hidden_layers": 1}, "the weights have 2 layers", "has layer 1, and the model's num_hidden_layers is 1;"),
        ({"num_hidden_layers": 3}, "the weights have no layer 2", "has no decoder.layers.2"),
        ({"hidden_size": 32}, "hidden_size is 32, and model.embed_tokens", "hidden_size is 32, and model.embed_tokens"),
        ({"num_experts": 4, "num_local_experts": 4}, None, "is 2, with 4 experts; is it a checkpoint"),
        ({"vocab_size": 99}, "vocab_size is 99", "the model needs .99, 64. at"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value", "no multiple of num_key_value"),
    ],
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, int], from_folder: str | None, from_checkpoint: str
) -> None:
    folder = made(tmp_path / "model")
    convert(folder, tmp_path / "megatron")
    other = edited(folder, tmp_path / "other", **changes)
    before = sorted(tmp_path.iterdir())
    if from_folder:
        with pytest.raises(ConfigError, match=from_folder):
            convert(other, tmp_path / "x")
    with pytest.raises(ConfigError, match=from_checkpoint):
        convert(tmp_path / "megatron", tmp_path / "x", model=other)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "from_folder", "from_checkpoint"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "k_norm.weight, which a Llama", "k_layernorm"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from", "has output_layer.weight, which a Qwen3ForCaus"),
    ],
    ids=["fewer tensors", "tied"],
)
def test_a_config_that_would_lose_tensors_of_the_model_is_refused(
    tmp_path: Path, changes: dict[str, object], from_folder: str, from_checkpoint: str
) -> None:
    folder = made(tmp_path / "model", "qwen3")
    convert(folder, tmp_path / "megatron")
    other = edited(folder, tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match=from_folder):
        convert(other, tmp_path / "x")
    with pytest.raises(ConfigError, match=from_checkpoint):
        convert(tmp_path / "megatron", tmp_path / "x", model=other)
    assert not (tmp_path / "x").exists()


def test_a_damaged_checkpoint_of_a_run_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "qwen3")
    convert(folder, tmp_path / "megatron")
    step = tmp_path / "step-00000001"
    shutil.copytree(tmp_path / "megatron" / "release", step / "backend")
    manifest.write(step)
    convert(step, tmp_path / "whole", model=folder)
    with (step / "backend" / ".metadata").open("r+b") as file:
        file.write(b"\0")
    with pytest.raises(ConfigError, match=r"step-00000001: is damaged: backend/.metadata is not as it was written"):
        convert(step, tmp_path / "x", model=folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_ended_leaves_nothing(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "model", "qwen3")
    monkeypatch.setattr(torch_dist, "write_chunks", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit, match=str(128 + number)):
        main(["convert", str(folder), str(tmp_path / "x")])
    assert sorted(tmp_path.iterdir()) == [folder]


def key_of_layer(key: str) -> tuple[int, str]:
    parts = key.split(".")
    return (int(parts[2]), ".".join(parts[3:])) if parts[:2] == ["decoder", "layers"] else (-1, key)


def test_errors_are_one_line_and_leave_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "model", "qwen3")
    convert(folder, tmp_path / "megatron")
    (tmp_path / "other").mkdir()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "backend").mkdir(parents=True)
    larger = made(tmp_path / "larger", "qwen2")
    before = sorted(tmp_path.iterdir())
    for words, said in (
        (["empty", "x"], "empty: is neither a Hugging Face model folder"),
        (["nowhere", "x"], "nowhere: is neither a Hugging Face model folder"),
        (["run", "x"], "run: has checkpoints of a run; name one of them, such as"),
        (["model", "empty"], "empty: exists"),
        (["model", "a/b/x"], "is not a folder; make it first"),
        (["other", "x"], ", this is GPT2LMHeadModel"),
        (["model", "x", "--model", str(folder)], "which has its own config.json"),
        (["megatron/release", "x"], "does not say which model it is of; --model FOLDER"),
        (["megatron/release", "x", "--model", "nowhere"], "--model: nowhere: no config.json there"),
        (["megatron", "x", "--model", str(larger)], "is it a checkpoint of another model"),
    ):
        paths = [str(tmp_path / word) for word in words[:2]]
        assert main(["convert", *paths, *words[2:]]) == 2
        text = capsys.readouterr().err
        assert said in text
        assert text.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before
    assert main(["convert", str(folder), str(tmp_path / "x")]) == 0
    assert " MB" in capsys.readouterr().out
