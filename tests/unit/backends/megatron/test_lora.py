"""Adapters in the Megatron backend train like a plain model in which W + scale x B A replaces each W.

The oracle is the reference backend: its gradient G of a merged W gives the gradients of the factors, scale x B^T G and
scale x G A^T. AdamW's eps is large, because with a small eps its step is nearly a sign.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.errors import ConfigError
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.tensors.transformers_models import by_names_in_files
from asyncrl.weights.files import FilesChannel
from tests.harness.backends import (
    RANKS,
    SETTINGS,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack

Tensors = dict[str, torch.Tensor]

LEARNING_RATE = 0.05
GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e6)
ADAPTERS = Lora(rank=4, alpha=8.0, modules=("all-linear",), is_merged=False)
EXPERTS = ("gate_proj", "up_proj", "down_proj")
MERGED = dataclasses.replace(ADAPTERS, is_merged=True)


def few_sequences(seed: int = 0) -> list[TrainingSequence]:
    """transformers computes each alone, so that their number is most of a test's time."""
    return sequences(seed, lengths=(12, 30, 2, 17))


def settings(lora: Lora) -> dict[str, Any]:
    return {"optimizer": dataclasses.replace(GENTLE, lora=lora)}


def factors(adapters: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B of every matrix, by its name in the folder. Exported adapters include the scale in B."""
    found = {}
    for name, down in adapters.items():
        module, is_down, _ = name.partition(".lora_A.weight")
        if is_down:
            up = adapters[f"{module}.lora_B.weight"] / ADAPTERS.scale
            found[f"{module.removeprefix('base_model.model.')}.weight"] = (down.clone(), up)
    return found


def merged(folder: Path, base: Tensors, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], into: Path) -> Path:
    shutil.copytree(folder, into)
    new = {name: base[name] + ADAPTERS.scale * up @ down for name, (down, up) in pairs.items()}
    save_file({**base, **new}, into / "model.safetensors", metadata={"format": "pt"})
    return into


def gradients(folder: Path, number: int) -> Tensors:
    """Return the gradients of every tensor of the folder for batch ``number``."""
    with started("reference", folder, optimizer=GENTLE) as plain:
        plain.step(shares("reference", few_sequences(number)), learning_rate=0.0)
        model = plain._trained["policy"]  # type: ignore[attr-defined]
        return dict(
            by_names_in_files(
                {name: weight.grad for name, weight in model._weights.items()}, model_type=model.model_type
            )
        )


@pytest.mark.parametrize(
    "architecture", ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "mixtral", "deepseek_v3", "gemma3", "gpt_oss"]
)
def test_adapters_train_as_the_factors_of_what_they_add_would(architecture: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base", architecture=architecture)
    base = load_file(folder / "model.safetensors")
    (row,) = pack(few_sequences(), max_tokens=1000)
    now = folder
    with started("megatron-1", folder, **settings(ADAPTERS)) as backend:
        pairs = factors(weights(backend))
        assert all(not up.any() and down.std() > 0.02 for down, up in pairs.values())
        adamw = torch.optim.AdamW(
            [factor for pair in pairs.values() for factor in pair],
            lr=LEARNING_RATE,
            betas=GENTLE.betas,
            eps=GENTLE.eps,
            weight_decay=GENTLE.weight_decay,
        )
        for number in range(2):
            of_weights = gradients(now, number)
            for name, (down, up) in pairs.items():
                down.grad = ADAPTERS.scale * up.T @ of_weights[name]
                up.grad = ADAPTERS.scale * of_weights[name] @ down.T
            adamw.step()
            backend.step(shares("megatron-1", few_sequences(number), max_tokens=30), learning_rate=LEARNING_RATE)
            trained = factors(weights(backend))
            for name, pair in pairs.items():
                for ours, theirs in zip(trained[name], pair, strict=True):
                    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0, msg=name)
            now = merged(folder, base, pairs, tmp_path / f"after-{number}")
        model, logprobs = hugging_face(now), forward(backend, "megatron-1", row)
        for start, stop in itertools.pairwise(row.boundaries):
            expected = expected_logprobs(model, row.tokens[start:stop])
            np.testing.assert_allclose(logprobs[start:stop], expected, atol=1e-4)


def test_a_merged_export_is_the_folder_plus_the_adapters_and_nothing_else_moves(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base")
    base = load_file(folder / "model.safetensors")
    exported, saved = [], []
    for lora in (MERGED, ADAPTERS):
        with started("megatron-1", folder, **settings(lora)) as backend:
            if lora is MERGED:
                assert distance(weights(backend), base) == 0.0  # B is 0
            backend.step(shares("megatron-1", few_sequences()), learning_rate=LEARNING_RATE)
            exported.append(weights(backend))
            backend.save(tmp_path / f"saved-{len(saved)}")
            saved.append(FileSystemReader(tmp_path / f"saved-{len(saved)}").read_metadata().state_dict_metadata)
    pairs = factors(exported[1])
    for name, weight in base.items():
        if name in pairs:
            down, up = pairs[name]
            torch.testing.assert_close(exported[0][name], weight + ADAPTERS.scale * up @ down, atol=1e-6, rtol=0)
            assert not torch.equal(exported[0][name], weight), name
        else:
            assert torch.equal(exported[0][name], weight), name
    of_model = [key for key in saved[0] if "decoder" in key or "embedding" in key or "output_layer" in key]
    assert of_model
    assert all("_adapter." in key for key in of_model), "a checkpoint has adapters alone"


def test_adapters_are_not_restored_on_other_weights(tmp_path: Path) -> None:
    """The same model in two files is no other model; a model with the same config.json may be one."""
    folder = tiny_model(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    with started("megatron-1", folder, **settings(ADAPTERS)) as backend:
        backend.save(tmp_path / "saved")
    (folder / "model.safetensors").unlink()
    files = {name: f"{number % 2}.safetensors" for number, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for shift in (0.0, 0.01):
        for file in set(files.values()):
            save_file({name: tensors[name] + shift for name in files if files[name] == file}, folder / file)
        with started("megatron-1", folder, **settings(ADAPTERS)) as backend:
            if shift:
                with pytest.raises(ConfigError, match=r"^model.path: .*/base has other weights than the model whose"):
                    backend.restore(tmp_path / "saved")
            else:
                backend.restore(tmp_path / "saved")


@pytest.mark.parametrize(
    ("kind", "architecture", "modules"),
    [
        pytest.param("megatron-tp2-ep2", "qwen3_moe", EXPERTS, id="tp2-ep2-experts", marks=RANKS),
        pytest.param("megatron-tp2-ep2", "qwen3_next", ADAPTERS.modules, id="tp2-ep2-linear", marks=RANKS),
        pytest.param("megatron-pp2-dp2", "gemma3", ADAPTERS.modules, id="pp2-dp2", marks=RANKS),
    ],
)
def test_ranks_that_share_a_model_train_the_adapters_of_one_process(
    kind: str, architecture: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path / "base", architecture=architecture)
    after = []
    for ranks in ("megatron-1", kind):
        with started(ranks, folder, **settings(dataclasses.replace(ADAPTERS, modules=modules))) as backend:
            backend.step(shares(ranks, few_sequences(), max_tokens=30), learning_rate=LEARNING_RATE)
            backend.save(tmp_path / ranks)
            again = []
            for _ in range(2):
                metrics = backend.step(
                    shares(ranks, few_sequences(1), max_tokens=30), learning_rate=LEARNING_RATE
                ).metrics
                again.append(weights(backend))
                backend.restore(tmp_path / ranks)
            assert distance(*again) == 0.0
            after.append((again[0], metrics["grad_norm"]))
    assert distance(after[0][0], after[1][0]) < 1e-5
    assert after[0][1] == pytest.approx(after[1][1], rel=1e-5)


@pytest.mark.parametrize("kind", ["megatron-1", pytest.param("megatron-tp2-ep2", marks=RANKS)])
def test_a_frozen_model_in_the_policys_folder_is_the_policy_without_its_adapters(kind: str, tmp_path: Path) -> None:
    """It is not loaded a second time, and forward passes of it change no step."""
    folder = tiny_model(tmp_path / "base", architecture="qwen3_moe")
    copy = shutil.copytree(folder, tmp_path / "copy")
    frozen = {"reference": AuxiliaryModel(path=folder), "teacher": AuxiliaryModel(path=copy)}
    (row,) = pack(few_sequences(), max_tokens=1000)
    after = []
    for names in ((), ("reference", "teacher")):
        with started(kind, folder, **settings(MERGED), auxiliary={name: frozen[name] for name in names}) as backend:
            if kind == "megatron-1":
                assert backend._rank._loaded.keys() == {"policy", *names} - {"reference"}  # type: ignore[attr-defined]
            for number in range(2):
                backend.step(shares(kind, few_sequences(number)), learning_rate=LEARNING_RATE)
                outputs = [forward(backend, kind, row, model=name) for name in ("policy", *names)]
                if names:
                    np.testing.assert_array_equal(outputs[1], outputs[2])
                    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3
            after.append(weights(backend))
    assert distance(*after) == 0.0


def test_a_published_version_is_a_folder_that_peft_reads(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base")
    channel = FilesChannel(tmp_path / "weights", keep=2, model_path=folder)
    with started("megatron-1", folder, **settings(ADAPTERS)) as backend:
        backend.step(shares("megatron-1", few_sequences()), learning_rate=LEARNING_RATE)
        first = channel.publish(backend.export(), incarnation=0, policy_version=1)
        version = channel.publish(backend.export(), incarnation=0, policy_version=2)
        exported = weights(backend)
    assert channel.verify(first) != channel.verify(version)
    made = Path(version.uri)
    assert {path.name for path in made.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (made / "model.safetensors").exists()
    assert version.num_bytes < (folder / "model.safetensors").stat().st_size
    found = load_file(made / "adapter_model.safetensors")
    assert distance(found, exported) == 0.0
    config = json.loads((made / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 4, 7)
    peft = pytest.importorskip("peft")
    base = load_file(folder / "model.safetensors")
    plain = hugging_face(merged(folder, base, factors(exported), tmp_path / "merged"))
    adapted = peft.PeftModel.from_pretrained(hugging_face(folder), made).eval()
    (one, *_) = few_sequences()
    np.testing.assert_allclose(expected_logprobs(adapted, one.tokens), expected_logprobs(plain, one.tokens), atol=1e-5)
