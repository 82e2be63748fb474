"""The contract of every backend for models besides the policy: a trained critic, and frozen models that score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.port import Backend
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import BackendError, CheckpointError, ConfigError
from asyncrl.policies.batching.packing import MicroBatch, empty, sequence_slices
from tests.harness.backends import (
    KINDS,
    KINDS_AND_RANKS,
    LEARNING_RATE,
    RANKS,
    critic,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    learned,
    num_shares,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
    with_returns,
)
from tests.harness.packing import pack

and_ranks = pytest.mark.parametrize("kind", KINDS_AND_RANKS, indirect=True)
CRITIC_RATE = 2e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def train_critic(backend: Backend, kind: str, *, steps: Sequence[int], returns: float | None = None) -> dict[str, Any]:
    """Return the metrics of the last step. Each step trains on sequences seeded with its number."""
    metrics: dict[str, Any] = {}
    for step in steps:
        cut = with_returns(shares(kind, sequences(step)), returns)
        metrics = dict(backend.step(cut, learning_rate=CRITIC_RATE, model="critic").metrics)
    return metrics


# -- a critic ----------------------------------------------------------------------------------------------------------


def test_a_new_critic_says_zero_of_every_token(kind: str, folder: Path) -> None:
    (packed,) = pack(sequences(), max_tokens=1000)
    with started(kind, folder, auxiliary={"critic": critic(folder)}) as backend:
        values = forward(backend, kind, packed, model="critic")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.zeros(packed.num_tokens))


def test_a_critic_learns_a_constant_return(kind: str, folder: Path) -> None:
    (packed,) = pack(sequences(), max_tokens=1000)
    # positions of the states in which a response token was chosen
    is_before_response = np.roll(packed.response_mask, -1)
    with started(kind, folder, auxiliary={"critic": critic(folder)}) as backend:
        first = train_critic(backend, kind, steps=[0], returns=1.5)
        last = train_critic(backend, kind, steps=[0] * 20, returns=1.5)
        values = forward(backend, kind, packed, model="critic")
    assert last["critic/loss"] < first["critic/loss"] / 100
    np.testing.assert_allclose(values[is_before_response], 1.5, atol=0.5)
    assert first["critic/tokens"] == sum(sequence.response_mask.sum() for sequence in sequences())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("megatron", [*KINDS[1:], pytest.param("megatron-4", marks=RANKS)])
def test_steps_of_a_critic_make_the_values_and_metrics_of_the_reference(
    tmp_path: Path, tied: bool, megatron: str
) -> None:
    """Whole, data-parallel and tensor-parallel: the gradient norm counts every gradient once."""
    model = tiny_model(tmp_path, tied=tied)
    (packed,) = pack(sequences(), max_tokens=1000)
    results: dict[str, list[Any]] = {"reference": [], megatron: []}
    for kind, found in results.items():
        with started(kind, model, auxiliary={"critic": critic(model)}) as backend:
            for step in range(3):
                metrics = train_critic(backend, kind, steps=[step])
                found.append((metrics, forward(backend, kind, packed, model="critic")))
            untouched = forward(backend, kind, packed)
        np.testing.assert_allclose(
            untouched[: packed.boundaries[1]],
            expected_logprobs(hugging_face(model), packed.tokens[: packed.boundaries[1]]),
            atol=1e-4,
        )
    for (metrics, values), (expected, expected_values) in zip(results[megatron], results["reference"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        np.testing.assert_allclose(values, expected_values, atol=1e-3)
    assert np.abs(expected_values).max() > 0.1


def test_a_value_is_of_the_state_before_the_token_it_is_trained_at(kind: str, folder: Path) -> None:
    """Returns are 1 and -1 at the first two response tokens, so these are the values after the last prompt token and
    after the first response token."""
    (packed,) = pack(sequences(lengths=(16,)), max_tokens=100)
    first = int(np.flatnonzero(packed.response_mask)[0])
    place = np.arange(packed.num_tokens)
    returns = np.select([place == first, place == first + 1], [1.0, -1.0]).astype(np.float32)
    packed = dataclasses.replace(
        packed, loss_weights=np.abs(returns), model_outputs={"old_values": np.zeros(16, np.float32), "returns": returns}
    )
    cut: list[list[MicroBatch]] = [[packed], *[[] for _ in range(num_shares(kind) - 1)]]
    with started(kind, folder, auxiliary={"critic": critic(folder)}) as backend:
        for _ in range(40):
            backend.step(cut, learning_rate=CRITIC_RATE, model="critic")
        values = forward(backend, kind, packed, model="critic")
    np.testing.assert_allclose(values[[first - 1, first]], [1.0, -1.0], atol=0.3)


@and_ranks
def test_a_critic_s_batch_that_is_not_finite_is_skipped(kind: str, folder: Path) -> None:
    (packed,) = pack(sequences(), max_tokens=1000)
    with started(kind, folder, auxiliary={"critic": critic(folder)}) as backend:
        train_critic(backend, kind, steps=[0])
        before, policy = forward(backend, kind, packed, model="critic"), weights(backend)
        metrics = train_critic(backend, kind, steps=[0], returns=math.nan)
        np.testing.assert_array_equal(forward(backend, kind, packed, model="critic"), before)
        assert metrics["critic/skipped_steps"] == 1.0
        assert train_critic(backend, kind, steps=[1])["critic/skipped_steps"] == 0.0
        assert distance(weights(backend), policy) == 0.0


@and_ranks
def test_an_objective_is_not_asked_about_micro_batches_without_response_tokens(kind: str, folder: Path) -> None:
    """Such micro-batches have no model outputs either."""
    with started(kind, folder, auxiliary={"critic": critic(folder)}) as backend:
        for share in ([empty()], []):
            cut: list[list[MicroBatch]] = [share] * num_shares(kind)
            metrics = backend.step(cut, learning_rate=CRITIC_RATE, model="critic").metrics
            assert (metrics["critic/loss"], metrics["critic/grad_norm"]) == (0.0, 0.0)


@and_ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_policy_and_critic_go_on_from_a_checkpoint_as_if_never_stopped(
    kind: str, folder: Path, tmp_path: Path, dtype: str
) -> None:
    (packed,) = pack(sequences(), max_tokens=1000)

    def both(backend: Backend, step: int) -> None:
        backend.step(shares(kind, sequences(step)), learning_rate=LEARNING_RATE)
        train_critic(backend, kind, steps=[step])

    results = []
    for is_resumed in (False, True):
        with started(kind, folder, dtype=dtype, auxiliary={"critic": critic(folder)}) as backend:
            if is_resumed:
                backend.restore(tmp_path)
            else:
                both(backend, 0)
                both(backend, 1)
                backend.save(tmp_path)
            both(backend, 2)
            results.append((weights(backend), forward(backend, kind, packed, model="critic")))
    assert distance(results[0][0], results[1][0]) == 0.0
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_checkpoint_without_the_critic_is_refused_before_anything_changes(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    with started(kind, folder) as backend:
        backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
        backend.save(tmp_path)
    with started(kind, folder, auxiliary={"critic": critic(folder)}) as backend:
        before = weights(backend)
        with pytest.raises(CheckpointError, match="has no critic"):
            backend.restore(tmp_path)
        assert distance(weights(backend), before) == 0.0


# -- frozen models -----------------------------------------------------------------------------------------------------


@and_ranks
def test_what_a_reference_says_does_not_change_when_the_policy_trains(kind: str, folder: Path) -> None:
    (packed,) = pack(sequences(), max_tokens=1000)
    with started(kind, folder, auxiliary={"reference": AuxiliaryModel(path=folder)}) as backend:
        start = forward(backend, kind, packed)
        np.testing.assert_allclose(forward(backend, kind, packed, model="reference"), start, atol=1e-5)
        backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
        np.testing.assert_allclose(forward(backend, kind, packed, model="reference"), start, atol=1e-5)
        assert np.abs(forward(backend, kind, packed) - start).max() > 1e-3


def test_a_policy_trains_the_same_whatever_is_held_beside_it(kind: str, folder: Path) -> None:
    beside = {"critic": critic(folder), "reference": AuxiliaryModel(path=folder)}
    results = []
    for auxiliary in ({}, beside):
        with started(kind, folder, auxiliary=auxiliary) as backend:
            for step in range(2):
                if auxiliary:
                    train_critic(backend, kind, steps=[step])
                metrics = backend.step(shares(kind, sequences(step)), learning_rate=LEARNING_RATE).metrics
            results.append((learned(metrics), weights(backend)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert distance(results[0][1], results[1][1]) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_teacher_of_another_shape_says_what_hugging_face_says(
    kind: str, folder: Path, tmp_path: Path, temperature: float
) -> None:
    make_tiny_model(tmp_path, architecture="llama", hidden_size=32, num_layers=3, num_heads=2, initializer_range=0.15)
    (packed,) = pack(sequences(), max_tokens=1000)
    teacher = {"teacher": AuxiliaryModel(path=tmp_path)}
    with started(kind, folder, auxiliary=teacher, temperature=temperature) as backend:
        logprobs = forward(backend, kind, packed, model="teacher")
    for where in sequence_slices(packed):
        expected = expected_logprobs(hugging_face(tmp_path), packed.tokens[where], temperature=temperature)
        np.testing.assert_allclose(logprobs[where], expected, atol=1e-4)


@and_ranks
def test_outputs_are_shaped_as_the_shares(kind: str, folder: Path) -> None:
    """Several micro-batches per rank, one of them empty: each sequence's outputs equal those it gets alone."""
    batch = sequences()
    cut = shares(kind, batch, max_tokens=31)
    cut[-1].append(empty())
    with started(kind, folder) as backend:
        found = backend.forward(cut)
    model = hugging_face(folder)
    assert [[len(row) for row in share] for share in found] == [[one.num_tokens for one in share] for share in cut]
    seen: dict[int, NDArray[np.float32]] = {}
    for share, rows in zip(cut, found, strict=True):
        for micro_batch, row in zip(share, rows, strict=True):
            where = sequence_slices(micro_batch)
            seen |= {int(index): row[part] for index, part in zip(micro_batch.sequences, where, strict=True)}
    assert sorted(seen) == [-1, *range(len(batch))]
    for index, sequence in enumerate(batch):
        np.testing.assert_allclose(seen[index], expected_logprobs(model, sequence.tokens), atol=1e-4)


def test_a_frozen_model_has_no_gradients_to_keep(folder: Path) -> None:
    with started("megatron-1", folder, auxiliary={"reference": AuxiliaryModel(path=folder)}) as backend:
        own: Any = backend
        parameters = own._rank._loaded["reference"]._parameters.values()
        assert not any(parameter.requires_grad or hasattr(parameter, "main_grad") for parameter in parameters)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_model_that_is_not_there_or_is_frozen_is_an_error(kind: str, folder: Path) -> None:
    with started(kind, folder, auxiliary={"reference": AuxiliaryModel(path=folder)}) as backend:
        with pytest.raises(BackendError, match="no model 'critic'.*policy, reference"):
            backend.forward(shares(kind, sequences()), model="critic")
        with pytest.raises(BackendError, match="step: no model 'reference'"):
            backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE, model="reference")


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_teacher_that_lacks_tokens_of_the_policy_is_a_config_error(kind: str, folder: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, characters="0123456789")
    with (
        pytest.raises(ConfigError, match=r"teacher\.path.*14 tokens, fewer than the policy's 50"),
        started(kind, folder, auxiliary={"teacher": AuxiliaryModel(path=tmp_path)}),
    ):
        pass


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_teacher_that_is_not_there_is_a_config_error(kind: str, folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"teacher\.path.*nowhere"),
        started(kind, folder, auxiliary={"teacher": AuxiliaryModel(path=tmp_path / "nowhere")}),
    ):
        pass


def test_numbers_of_other_models_reach_the_objective_beside_the_tokens_they_are_about(folder: Path) -> None:
    """Also through a follower's pipe (the codec), and only for response tokens."""
    from asyncrl.backends.megatron.job import Command
    from asyncrl.backends.micro_batches import PackedRow, response_rows
    from asyncrl.messages import codec

    (packed,) = pack(sequences(), max_tokens=1000)
    packed = dataclasses.replace(packed, model_outputs={"ref_logprobs": np.arange(packed.num_tokens, dtype=np.float32)})
    command = Command(name="step", micro_batches=(packed,))
    (received,) = codec.decode(codec.encode(command), Command).micro_batches
    rows = response_rows(received)
    row = PackedRow.from_micro_batch(received, rows, device=torch.device("cpu"), in_rectangles=True)
    inputs = row.loss_inputs(torch.zeros(len(rows)), torch.zeros(len(rows)))
    assert inputs.model_outputs["ref_logprobs"].tolist() == rows.tolist()
    assert received.sequences.tolist() == packed.sequences.tolist() == list(range(len(sequences())))
