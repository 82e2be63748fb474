"""Full training exports to the host: the same bytes as a copy on the device, whatever later steps do."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.tensors.snapshot import Bucket, HostBucket, KeptBucket, Snapshot
from asyncrl.weights.files import FilesChannel
from tests.harness.backends import RANKS, SETTINGS, sequences, shares, started, tiny_model
from tests.unit.backends.megatron.test_kept_exports import all_bits, copied, is_same

PARTS = dataclasses.replace(SETTINGS, freeze=("mlp", "embed"))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen3", "bfloat16"), ("qwen2_moe", "bfloat16"), ("qwen3_next", "float32"), ("gpt_oss", "float32")],
)
def test_an_export_to_the_host_is_the_copied_one(architecture: str, dtype: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base", architecture=architecture)
    with started("megatron-1", folder, dtype=dtype, exports_to="host") as backend:
        backend.step(shares("megatron-1", sequences()), learning_rate=0.05)
        before, snapshot = all_bits(copied(backend)), backend.export()
        backend.step(shares("megatron-1", sequences(1)), learning_rate=0.05)
        assert all(isinstance(bucket, HostBucket) for bucket in snapshot.buckets)
        assert is_same(dict(snapshot.tensors()), before)
        assert is_same(dict(snapshot.cut(2_000).tensors()), before)
        sent = {name: one.clone() for bucket in snapshot.buckets for name, one in bucket.filled().tensors()}
        assert is_same(sent, before)
        assert not is_same(copied(backend), before)


def test_what_is_frozen_is_not_copied_to_the_host(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "base", architecture="mixtral")
    with started("megatron-1", folder, optimizer=PARTS, exports_to="host") as backend:
        snapshot = backend.export()
        for bucket in snapshot.buckets:
            are_frozen = {".mlp." in entry.name or "embed" in entry.name for entry in bucket.entries}
            assert are_frozen == {isinstance(bucket, KeptBucket)}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(f"megatron-{layout}", marks=RANKS) for layout in ("2", "tp2-ep2", "pp2-ep2")],
)
def test_every_layout_exports_the_same_bytes_to_the_host(kind: str, tmp_path: Path) -> None:
    """What ranks must gather is copied bucket by bucket. The version is written after the next step."""
    folder = tiny_model(tmp_path / "base", architecture="qwen3_moe", num_layers=4)
    written = []
    for where in ("device", "host"):
        channel = FilesChannel(tmp_path / where, keep=1, model_path=folder)
        with started(kind, folder, exports_to=where) as backend:
            backend.step(shares(kind, sequences()), learning_rate=0.05)
            snapshot = backend.export()
            backend.step(shares(kind, sequences(1)), learning_rate=0.05)
            version = channel.publish(snapshot, incarnation=0, policy_version=1)
            del snapshot
        files = sorted(Path(version.uri).glob("*.safetensors"))
        written.append({name: one for file in files for name, one in load_file(file).items()})
    assert is_same(*written)


def test_a_second_copy_is_never_made_on_a_gpu_while_the_first_is_in_use(tmp_path: Path) -> None:
    """However it is held: by a snapshot, or by a view of one of its buckets that an engine still receives."""
    with started("megatron-1", tiny_model(tmp_path / "base")) as backend:
        policy: Any = backend._rank._loaded["policy"]  # type: ignore[attr-defined]

        def goes_to_host() -> bool:
            device, policy._device = policy._device, torch.device("cuda")
            try:
                return bool(policy._goes_to_host())
            finally:
                policy._device = device

        assert not goes_to_host()
        first: Snapshot | None = backend.export()
        assert goes_to_host()
        assert first is not None
        bucket = first.cut(1_000).buckets[0]
        assert isinstance(bucket, Bucket)
        view: torch.Tensor | None = bucket.data[:8]
        del first, bucket
        gc.collect()
        assert goes_to_host()
        view = None  # noqa: F841
        assert not goes_to_host()
