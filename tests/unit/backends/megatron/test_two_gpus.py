"""Two ranks on two GPUs over NCCL: every layout of two ranks trains the same as one process on the CPU, and an engine
receives both ranks' parts of the weights.

Each rank has its own GPU, and NCCL does not let two members of a group share a GPU. So the engine receives rank 0's
part on rank 1's GPU, and rank 1's part on rank 0's GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray

from asyncrl.backends.megatron import process_groups
from asyncrl.tensors.snapshot import Bucket, TensorEntry
from asyncrl.weights.nccl import Sender
from tests.harness.backends import (
    LAYOUTS,
    SETTINGS,
    distance,
    forward,
    learned,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.nccl import PATIENCE, Peer
from tests.harness.packing import pack
from tests.harness.transfers import collective_of

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(900)]

LEARNING_RATE = 0.05
GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e6)
"""See test_layouts.py."""
CASES = (
    ("megatron-2", "qwen3"),
    ("megatron-tp2", "qwen3"),
    ("megatron-tp2", "qwen3", "overlap_tensor_parallel"),
    ("megatron-pp2", "qwen3"),
    ("megatron-vpp2", "qwen3"),
    ("megatron-cp2", "qwen3"),
    ("megatron-ep2", "qwen3_moe"),
    ("megatron-tp2-ep2", "qwen3_moe"),
    ("megatron-cp2-ep2", "deepseek_v3"),
    ("megatron-pp2", "glm4_moe"),
)


@dataclasses.dataclass(frozen=True)
class Done:
    """Results of a backend: logprobs of one row; metrics and weights of a step; weights from its checkpoint; and the
    weights that an engine received before the step, by name."""

    logprobs: NDArray[np.float32]
    metrics: Mapping[str, float]
    after: dict[str, torch.Tensor]
    restored: dict[str, torch.Tensor]
    arrived: dict[str, torch.Tensor]


def done(kind: str, folder: Path, saved: Path, *without: str, device: str) -> Done:
    """``without``: options of the backend that are off."""
    (row,) = pack(sequences(), max_tokens=1000)
    with started(kind, folder, optimizer=GENTLE, device=device, options=dict.fromkeys(without, False)) as backend:
        if kind == "megatron-tp2" and device == "cuda":
            assert (process_groups.exchange() is None) == bool(without)
        logprobs = forward(backend, kind, row)
        arrived = received(backend.export(), parts=LAYOUTS[kind].exporters) if device == "cuda" else {}
        cut = shares(kind, sequences(), max_tokens=30)
        metrics = learned(backend.step(cut, learning_rate=LEARNING_RATE).metrics)
        after = {name: tensor.cpu() for name, tensor in weights(backend).items()}
        restored = {}
        if device == "cuda":
            backend.save(saved)
            backend.step(cut, learning_rate=LEARNING_RATE)
            backend.restore(saved)
            restored = {name: tensor.cpu() for name, tensor in weights(backend).items()}
        return Done(logprobs, metrics, after, restored, arrived)


def received(exported: Any, *, parts: int) -> dict[str, torch.Tensor]:
    """Receive twice over the same groups; both transfers must be equal."""
    sender, peer = Sender("127.0.0.1", patience_seconds=PATIENCE), Peer(devices=["cuda:1", "cuda:0"])
    sender.set_weights(exported, incarnation=0, policy_version=1)
    try:
        peer.meet(sender)
        first, second = peer.receive(sender), peer.receive(sender)
        own = collective_of(sender.begin(peer.joined).offer)
    finally:
        peer.close()
    assert first == second
    assert len(own.others) == parts - 1
    found: dict[str, torch.Tensor] = {}
    layouts = [layout for part in (own, *own.others) for layout in part.buckets]
    for layout, data in zip(layouts, first, strict=True):
        entries = tuple(
            TensorEntry(name=name, dtype=getattr(torch, dtype), shape=shape)
            for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True)
        )
        found |= dict(Bucket(entries=entries, data=torch.frombuffer(bytearray(data), dtype=torch.uint8)).tensors())
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    folder: Path
    expected: Done
    got: Done


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[Path, Done]]:
    """References by architecture."""
    return {}


def name_of(case: tuple[str, ...]) -> str:
    kind, architecture, *without = case
    return "-".join([kind, architecture, *(f"without-{option}" for option in without)])


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    references: dict[str, tuple[Path, Done]],
) -> Iterator[Case]:
    kind, architecture, *without = request.param
    saved = tmp_path_factory.mktemp("saved")
    if architecture not in references:
        folder = tiny_model(tmp_path_factory.mktemp("model"), architecture=architecture, num_layers=4)
        references[architecture] = (folder, done("reference", folder, saved, device="cpu"))
    folder, expected = references[architecture]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_CUMEM_ENABLE", "0")  # as in adapters/registry.py and bin/test-gpu
        yield Case(folder, expected, done(kind, folder, saved, *without, device="cuda"))


def test_outputs_are_those_of_one_process(case: Case) -> None:
    errors = np.abs(case.got.logprobs - case.expected.logprobs)
    assert errors.mean() < 1e-5
    assert errors.max() < 1e-4


def test_a_step_makes_the_metrics_and_the_weights_of_one_process(case: Case) -> None:
    """Loss, entropy, every diagnostic and the gradient norm: each token and each gradient counts once."""
    assert case.got.metrics == pytest.approx(case.expected.metrics, rel=1e-3, abs=1e-4)
    before = safetensors.torch.load_file(case.folder / "model.safetensors")
    assert distance(case.got.after, case.expected.after) < 3e-3 * distance(before, case.expected.after)


def test_checkpoint_restores_bit_for_bit(case: Case) -> None:
    assert distance(case.got.restored, case.got.after) == 0.0


def test_nccl_delivers_all_parts_bit_for_bit(case: Case) -> None:
    published = safetensors.torch.load_file(case.folder / "model.safetensors")
    assert distance(case.got.arrived, published) == 0.0
