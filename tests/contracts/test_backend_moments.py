"""What every backend keeps of AdamW's moments: all, none between batches, or none in checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from asyncrl.backends.port import ResetsOptimizer
from tests.harness.backends import (
    KINDS,
    LEARNING_RATE,
    SETTINGS,
    distance,
    gradients_of_megatron,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)

STATELESS = dataclasses.replace(SETTINGS, is_stateless=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("moments") / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_optimizer_steps_as_one_that_has_never_stepped(kind: str, folder: Path, tmp_path: Path) -> None:
    with started(kind, folder) as backend:
        backend.step(shares(kind, sequences(0)), learning_rate=LEARNING_RATE)
        first = weights(backend)
        backend.export()
        assert isinstance(backend, ResetsOptimizer)
        backend.reset_optimizer()
        backend.save(tmp_path)
        backend.step(shares(kind, sequences(1)), learning_rate=LEARNING_RATE)
        second = weights(backend)
        with_moments = backend.step(shares(kind, sequences(2)), learning_rate=LEARNING_RATE)
        assert with_moments.metrics["learner/skipped_steps"] == 0
    with started(kind, folder) as fresh:
        fresh.restore(tmp_path)  # the weights after the first step, and no moments
        assert distance(weights(fresh), first) == 0.0
        fresh.step(shares(kind, sequences(1)), learning_rate=LEARNING_RATE)
        assert distance(weights(fresh), second) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_the_optimizer_has_the_weights_and_says_so(
    kind: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {}
    for is_saved in (True, False):
        saved = tmp_path / str(is_saved)
        with started(kind, folder, optimizer=dataclasses.replace(SETTINGS, is_saved=is_saved)) as backend:
            backend.step(shares(kind, sequences(0)), learning_rate=LEARNING_RATE)
            trained = weights(backend)
            backend.save(saved)
            sizes[is_saved] = sum(file.stat().st_size for file in saved.iterdir())
            parameters = sum(one.numel() for one in trained.values())
        with started(kind, folder) as backend, caplog.at_level(logging.WARNING, logger="asyncrl.learner"):
            caplog.clear()
            backend.restore(saved)
            assert distance(weights(backend), trained) == 0.0
            said = [line for line in caplog.messages if "has no optimizer state: AdamW starts anew" in line]
            assert len(said) == (0 if is_saved else 1)
    assert sizes[True] - sizes[False] >= 8 * parameters


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_before_the_first_step_lacks_no_moments(
    kind: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(kind, folder) as backend, caplog.at_level(logging.WARNING, logger="asyncrl.learner"):
        backend.save(tmp_path)
        backend.restore(tmp_path)
    assert not [line for line in caplog.messages if "optimizer" in line]


def test_a_stateless_update_is_the_first_one_of_adamw_and_keeps_nothing(folder: Path, tmp_path: Path) -> None:
    """m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|: w (1 - lr x decay) - lr g / (|g| + eps)."""
    with started("megatron-1", folder, optimizer=STATELESS) as backend:
        before = weights(backend)
        for number in range(2):
            before = weights(backend)
            backend.step(shares("megatron-1", sequences(number)), learning_rate=LEARNING_RATE)
        gradients = gradients_of_megatron(backend)
        after = weights(backend)
        assert not any(part.adamw.state for part in backend._rank._trained["policy"]._optimizers)  # type: ignore[attr-defined]
        backend.save(tmp_path)
    for name, weight in before.items():
        gradient = gradients[name]  # clipped
        decay = SETTINGS.weight_decay if weight.ndim > 1 else 0.0
        expected = weight * (1 - LEARNING_RATE * decay) - LEARNING_RATE * gradient / (gradient.abs() + SETTINGS.eps)
        torch.testing.assert_close(after[name], expected, rtol=1e-4, atol=2e-6, msg=name)


def test_moments_in_bfloat16_are_rounded_between_updates(folder: Path, tmp_path: Path) -> None:
    options = {"moments_dtype": "bfloat16"}
    with started("megatron-1", folder) as exact:
        for number in range(2):
            exact.step(shares("megatron-1", sequences(number)), learning_rate=LEARNING_RATE)
        unrounded = weights(exact)
    with started("megatron-1", folder, options=options) as backend:
        for number in range(2):
            backend.step(shares("megatron-1", sequences(number)), learning_rate=LEARNING_RATE)
        rounded = weights(backend)
        state = backend._rank._trained["policy"]._optimizers[0].adamw.state  # type: ignore[attr-defined]
        assert {one["exp_avg"].dtype for one in state.values()} == {torch.bfloat16}
        backend.save(tmp_path)
        backend.step(shares("megatron-1", sequences(2)), learning_rate=LEARNING_RATE)
        third = weights(backend)
    # The step is at most the learning rate, and moments keep 8 bits: 1/256 each.
    assert 0 < distance(rounded, unrounded) < LEARNING_RATE / 64
    with started("megatron-1", folder, options=options) as backend:
        backend.restore(tmp_path)
        backend.step(shares("megatron-1", sequences(2)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), third) == 0.0
