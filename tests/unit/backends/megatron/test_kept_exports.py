"""An export copies no frozen tensor, and is equal to one that copies all of them, whatever later steps do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.backends.megatron import adapters as megatron_adapters
from asyncrl.backends.optimizer_settings import Lora, OptimizerSettings
from asyncrl.backends.port import Offloads
from asyncrl.tensors.snapshot import Bucket, Snapshot
from asyncrl.weights.files import FilesChannel
from tests.harness.backends import RANKS, SETTINGS, distance, sequences, shares, started, tiny_model, weights

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES = ["qwen3", "qwen3_moe", "qwen2_moe", "qwen3_next", "mixtral", "deepseek_v3", "gemma3", "glm4_moe", "gpt_oss"]


def adapters(*modules: str) -> OptimizerSettings:
    return dataclasses.replace(SETTINGS, lora=Lora(rank=8, alpha=16.0, modules=modules, is_merged=True))


def all_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def copied(backend: Any) -> dict[str, torch.Tensor]:
    """Return what an export of one rank would be if it copied every tensor."""
    policy = backend._rank._loaded["policy"]
    return dict(Snapshot.from_tensors(policy._exported(keeps=False)).tensors())


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


ALL, PARTS = adapters("all-linear"), dataclasses.replace(SETTINGS, freeze=("mlp", "embed"))


@pytest.mark.parametrize(
    ("architecture", "trained", "dtype"),
    [
        *[(architecture, ALL, "float32") for architecture in FAMILIES],
        *[("qwen3_moe", adapters(*ATTENTION), dtype) for dtype in ("float32", "bfloat16")],
        *[(architecture, ALL, "bfloat16") for architecture in ("qwen3", "qwen2_moe")],
        *[(architecture, PARTS, "float32") for architecture in ("qwen3_next", "qwen3_5", "mixtral", "gpt_oss")],
    ],
)
def test_a_kept_export_is_the_copied_one(
    architecture: str, trained: OptimizerSettings, dtype: str, tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path / "base", architecture=architecture)
    with started("megatron-1", folder, optimizer=trained, dtype=dtype) as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=0.05)
        before, snapshot = all_bits(copied(backend)), backend.export()
        backend.step(shares("megatron-1", sequences(1)), learning_rate=0.05)
        assert is_same(dict(snapshot.tensors()), before)
        assert is_same(dict(snapshot.cut(2_000).tensors()), before)
        assert not is_same(copied(backend), before)
        copies = [entry.name for bucket in snapshot.buckets if isinstance(bucket, Bucket) for entry in bucket.entries]
        for name in copies:
            is_buffer = name.endswith("e_score_correction_bias")
            assert is_buffer or (trained.lora is None and ".mlp." not in name and "embed" not in name), name


def test_sums_are_made_in_pieces_of_rows_and_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5,000 numbers in float32 at a time, in buckets that end in the middle of an expert."""
    monkeypatch.setattr(megatron_adapters, "_MERGE_NUMBERS", 5_000)
    folder = tiny_model(tmp_path / "base", architecture="qwen3_moe")
    with started("megatron-1", folder, optimizer=ALL, dtype="bfloat16") as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=0.05)
        before, snapshot = all_bits(copied(backend)), backend.export()
        for bucket_bytes in (1, 7_000, 10_000, 2**30):
            assert is_same(dict(snapshot.cut(bucket_bytes).tensors()), before)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(f"megatron-{layout}", marks=RANKS) for layout in ("tp2", "ep2-dp2", "tp2-ep2", "pp2-ep2", "vpp2")],
)
def test_every_layout_exports_the_same_sum_of_model_and_adapters(kind: str, tmp_path: Path) -> None:
    """What ranks have whole is kept, and what they must gather is copied."""
    folder = tiny_model(tmp_path / "base", architecture="qwen3_moe", num_layers=4)
    with started("megatron-1", folder, optimizer=ALL) as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=0.05)
        backend.save(tmp_path / "saved")
        expected = copied(backend)
    channel = FilesChannel(tmp_path / "weights", keep=1, model_path=folder)
    with started(kind, folder, optimizer=ALL) as backend:
        backend.restore(tmp_path / "saved")
        snapshot = backend.export()
        backend.step(shares(kind, sequences(1)), learning_rate=0.05)
        version = channel.publish(snapshot, incarnation=0, policy_version=1)
        assert distance(weights(backend), expected) > 1e-3
    files = sorted(Path(version.uri).glob("*.safetensors"))
    assert distance({name: one for file in files for name, one in load_file(file).items()}, expected) < 1e-6


def test_a_version_that_is_written_late_is_of_its_step(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base", architecture="mixtral")
    channel = FilesChannel(tmp_path / "weights", keep=3, model_path=folder)
    with started("megatron-1", folder, optimizer=ALL) as backend:
        snapshots, expected = [], []
        for number in range(3):
            backend.step(shares("megatron-1", sequences(number)), learning_rate=0.05)
            snapshots.append(backend.export())
            expected.append(all_bits(copied(backend)))
        for number, snapshot in enumerate(snapshots):
            version = channel.publish(snapshot, incarnation=0, policy_version=number)
            assert is_same(load_file(Path(version.uri) / "model.safetensors"), expected[number])


@pytest.mark.parametrize("takes_turns", [False, True])
def test_an_export_outlives_models_that_leave_the_device(takes_turns: bool, tmp_path: Path) -> None:
    """run.colocated: engines take the weights from the learner's memory while its models are away."""
    folder = tiny_model(tmp_path / "base")
    with started("megatron-1", folder, optimizer=ALL, takes_turns=takes_turns) as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=0.05)
        expected, snapshot = all_bits(copied(backend)), backend.export()
        assert all(bucket.is_kept != takes_turns for bucket in snapshot.buckets)
        assert isinstance(backend, Offloads)
        if takes_turns:
            backend.offload()
        assert is_same(dict(snapshot.tensors()), expected)
        if takes_turns:
            backend.onload()
        assert is_same(dict(snapshot.tensors()), expected)
