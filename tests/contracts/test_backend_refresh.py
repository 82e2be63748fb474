"""A reference that becomes the policy every n steps (reference.refresh_steps), in every backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from asyncrl.actors.learner.training_step import train_batch
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.backends.port import RefreshesReference
from asyncrl.errors import CheckpointError
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import pack_for_ranks
from tests.harness.backends import KINDS, LEARNING_RATE, SETTINGS, forward, sequences, shares, started, tiny_model
from tests.harness.packing import pack
from tests.harness.scripted_backend import ScriptedBackend, answer, built

ADAPTERS = dataclasses.replace(SETTINGS, lora=Lora(rank=4, alpha=8.0, modules=("all-linear",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "model", architecture="qwen3_moe")


@pytest.mark.parametrize("kind", [*KINDS, "adapters"])
def test_a_refreshed_reference_is_the_policy_of_then_and_a_checkpoint_holds_it(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    settings = ADAPTERS if kind == "adapters" else SETTINGS
    kind = "megatron-1" if kind == "adapters" else kind
    auxiliary = {"reference": AuxiliaryModel(path=folder, is_refreshed=True)}
    (looked_at,) = pack(sequences(7), max_tokens=999)
    with started(kind, folder, auxiliary=auxiliary, optimizer=settings) as backend:
        assert isinstance(backend, RefreshesReference)
        first = forward(backend, kind, looked_at, model="reference")
        backend.step(shares(kind, sequences(0)), learning_rate=LEARNING_RATE)
        policy = forward(backend, kind, looked_at)
        np.testing.assert_array_equal(forward(backend, kind, looked_at, model="reference"), first)
        assert abs(policy - first).max() > 1e-3
        backend.refresh_reference()
        refreshed = forward(backend, kind, looked_at, model="reference")
        np.testing.assert_allclose(refreshed, policy, atol=1e-5)
        backend.step(shares(kind, sequences(1)), learning_rate=LEARNING_RATE)
        np.testing.assert_array_equal(forward(backend, kind, looked_at, model="reference"), refreshed)
        backend.save(tmp_path / "saved")
    with started(kind, folder, auxiliary=auxiliary, optimizer=settings) as backend:
        backend.restore(tmp_path / "saved")
        np.testing.assert_array_equal(forward(backend, kind, looked_at, model="reference"), refreshed)


@pytest.mark.parametrize("kind", ["reference", "megatron-1"])
def test_a_checkpoint_without_the_reference_is_refused_in_one_line(kind: str, folder: Path, tmp_path: Path) -> None:
    with started(kind, folder) as backend:
        backend.save(tmp_path / "saved")
    auxiliary = {"reference": AuxiliaryModel(path=folder, is_refreshed=True)}
    with started(kind, folder, auxiliary=auxiliary) as backend, pytest.raises(CheckpointError, match="no reference"):
        backend.restore(tmp_path / "saved")


class Refreshed(ScriptedBackend):
    def refresh_reference(self) -> None:
        self.asked.append("refresh")


def test_the_reference_is_refreshed_after_every_n_th_step() -> None:
    backend, algorithm = Refreshed(), resolve(ALGORITHMS["grpo"])
    batch = built((answer([10, 11], reward=1.0), answer([20], reward=0.0)), algorithm)
    for step in range(5):
        rows = [pack_for_ranks(batch.sequences, ranks=1, max_tokens=99)]
        train_batch(backend, batch, rows, algorithm=algorithm, step=step, learning_rate=0.1, refresh_steps=2)
    assert backend.asked == ["step policy", "step policy", "refresh"] * 2 + ["step policy"]
