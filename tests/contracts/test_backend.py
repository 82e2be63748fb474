"""The contract of every backend: reference, and Megatron-Core on one and two ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.backends.port import Offloads
from asyncrl.errors import BackendError, CheckpointError
from asyncrl.policies.batching.packing import empty, pack_for_ranks, recording, sequence_slices
from tests.harness.backends import (
    KINDS,
    KINDS_AND_RANKS,
    LEARNING_RATE,
    RANKS,
    SETTINGS,
    cut,
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
)
from tests.harness.packing import pack

and_ranks = pytest.mark.parametrize("kind", KINDS_AND_RANKS, indirect=True)
ARCHITECTURES = ("qwen2", "qwen3", "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_a_packed_row_are_those_of_each_sequence_alone(kind: str, folder: Path, temperature: float) -> None:
    (packed,) = pack(sequences(), max_tokens=1000)
    with started(kind, folder, temperature=temperature) as backend:
        logprobs = forward(backend, kind, packed)
    model = hugging_face(folder)
    assert logprobs.dtype == np.float32
    for where in sequence_slices(packed):
        expected = expected_logprobs(model, packed.tokens[where], temperature=temperature)
        np.testing.assert_allclose(logprobs[where], expected, atol=1e-4)


def test_logprobs_are_over_the_tokens_and_at_the_temperature_that_each_was_sampled_from(
    kind: str, folder: Path
) -> None:
    """Where an engine cut the distribution, log p - log sum of p over what it kept; elsewhere nothing changes."""
    batch = cut(sequences())
    (packed,) = pack(batch, max_tokens=1000)
    with started(kind, folder) as backend:
        logprobs = forward(backend, kind, packed)
        twice = [backend.step(shares(kind, batch, max_tokens=n), learning_rate=0.0).metrics for n in (1000, 31)]
    model = hugging_face(folder)
    for where, one in zip(sequence_slices(packed), batch, strict=True):
        temperature = one.temperature or 1.0
        expected = expected_logprobs(model, one.tokens, temperature=temperature)
        ids = torch.from_numpy(one.tokens.astype(np.int64))
        every = torch.softmax(model(ids[None]).logits[0] / temperature, -1).detach().numpy()
        starts = np.cumsum(one.support.counts) - one.support.counts
        for n in np.flatnonzero(one.support.counts):
            kept = one.support.tokens[starts[n] : starts[n] + one.support.counts[n]]
            expected[n] -= np.log(every[n - 1][kept].sum())
        np.testing.assert_allclose(logprobs[where], expected, atol=1e-4)
    assert learned(twice[1]) == pytest.approx(learned(twice[0]), rel=1e-4, abs=1e-4)


def test_sequences_in_one_row_do_not_see_each_other(kind: str, folder: Path) -> None:
    first, other, last = sequences(lengths=(20, 20, 13))
    with started(kind, folder) as backend:
        one = forward(backend, kind, pack([first, last], max_tokens=100)[0])[-13:]
        two = forward(backend, kind, pack([other, last], max_tokens=100)[0])[-13:]
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_a_step_is_adamw_on_the_clipped_sum_of_policy_gradients(folder: Path) -> None:
    """Recompute the step by hand, sequence by sequence: min(ratio, 2) x -A x logprob x weight, as GRPO with TIS at
    ratio 1."""
    batch = sequences()
    model = hugging_face(folder)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": SETTINGS.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
    )
    for item in batch:
        ids = torch.from_numpy(item.tokens.astype(np.int64))
        logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        importance = (logprobs.detach() - torch.tensor(item.behavior_logprobs[1:])).exp().clamp(max=2.0)
        weight = torch.tensor(item.advantages[1:] * item.loss_weights[1:])
        (-logprobs * importance * weight).sum().backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.max_grad_norm)
    optimizer.step()
    with started("reference", folder) as backend:
        metrics = backend.step(shares("reference", batch), learning_rate=LEARNING_RATE).metrics
        assert distance(weights(backend), dict(model.named_parameters())) < 1e-5
    assert metrics["grad_norm"] == pytest.approx(float(grad_norm), rel=1e-4)
    assert metrics["grad_norm"] > SETTINGS.max_grad_norm  # the gradient was clipped


@pytest.mark.parametrize("megatron", KINDS[1:])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_three_steps_make_the_weights_and_metrics_of_the_reference(
    tmp_path: Path, architecture: str, tied: bool, megatron: str
) -> None:
    model = tiny_model(tmp_path, architecture=architecture, tied=tied)
    results = {}
    for kind in ("reference", megatron):
        with started(kind, model) as backend:
            before = weights(backend)
            for step in range(3):
                metrics = backend.step(shares(kind, sequences(step)), learning_rate=LEARNING_RATE).metrics
                results[kind, step] = (weights(backend), learned(metrics))
    for step in range(3):
        expected, got = results["reference", step], results[megatron, step]
        assert distance(got[0], expected[0]) < 1e-4
        assert got[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-4)
    assert distance(before, expected[0]) > 10 * 1e-4  # the weights moved further than the tolerance


@and_ranks
def test_gradients_do_not_depend_on_how_the_batch_is_cut(kind: str, folder: Path) -> None:
    batch = sequences()
    results = []
    for max_tokens, order in ((1000, 1), (31, 1), (40, -1)):
        with started(kind, folder) as backend:
            dealt = shares(kind, batch[::order], max_tokens=max_tokens)[::order]
            norm = backend.step(dealt, learning_rate=LEARNING_RATE).metrics["grad_norm"]
            results.append((norm, weights(backend)))
    for norm, other in results[1:]:
        assert norm == pytest.approx(results[0][0], rel=1e-5)
        assert distance(other, results[0][1]) < 2e-5


@and_ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restored_training_equals_uninterrupted_training(kind: str, folder: Path, tmp_path: Path, dtype: str) -> None:
    with started(kind, folder, dtype=dtype) as backend:
        for step in range(2):
            backend.step(shares(kind, sequences(step)), learning_rate=LEARNING_RATE)
        backend.save(tmp_path)
        backend.step(shares(kind, sequences(2)), learning_rate=LEARNING_RATE)
        uninterrupted = weights(backend)
    with started(kind, folder, dtype=dtype) as backend:
        backend.restore(tmp_path)
        backend.step(shares(kind, sequences(2)), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), uninterrupted) == 0.0


@and_ranks
def test_a_checkpoint_from_before_the_first_step_restores(kind: str, folder: Path, tmp_path: Path) -> None:
    with started(kind, folder) as backend:
        start = weights(backend)
        backend.save(tmp_path)
        backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
        after = weights(backend)
        backend.restore(tmp_path)
        assert distance(weights(backend), start) == 0.0
        backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), after) == 0.0


@and_ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_that_left_the_gpus_and_came_back_is_training_that_stayed(kind: str, folder: Path, dtype: str) -> None:
    def trained(*, leaves: bool) -> dict[str, torch.Tensor]:
        with started(kind, folder, dtype=dtype) as backend:
            assert isinstance(backend, Offloads)
            for seed in range(3):
                if leaves:
                    backend.export()  # other ranks drop their parts of it when they leave
                    backend.offload()
                    backend.onload()
                backend.step(shares(kind, sequences(seed)), learning_rate=LEARNING_RATE)
            return weights(backend)

    stayed, left = trained(leaves=False), trained(leaves=True)
    for name, tensor in stayed.items():
        assert torch.equal(left[name], tensor), name


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_folder_that_is_no_checkpoint_is_a_checkpoint_error(kind: str, folder: Path, tmp_path: Path) -> None:
    with started(kind, folder) as backend, pytest.raises(CheckpointError, match=str(tmp_path)):
        backend.restore(tmp_path)


def test_export_gives_back_the_folder_bit_for_bit(kind: str, folder: Path) -> None:
    with started(kind, folder) as backend:
        exported = weights(backend)
    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name
        assert exported[name].dtype == tensor.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_an_export_has_the_run_s_dtype(kind: str, tmp_path: Path, stored: str, dtype: str) -> None:
    """Engines of a float32 run would sample from rounded weights, and those of a bfloat16 run get twice the bytes."""
    tensors = load_file(tiny_model(tmp_path) / "model.safetensors").items()
    save_file({name: one.to(getattr(torch, stored)) for name, one in tensors}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    with started(kind, tmp_path, dtype=dtype) as backend:
        backend.step(shares(kind, sequences(0)), learning_rate=LEARNING_RATE)
        assert {entry.dtype for entry in backend.export().entries} == {getattr(torch, dtype)}


def test_an_export_is_a_snapshot_that_hugging_face_loads(kind: str, folder: Path, tmp_path: Path) -> None:
    (packed,) = pack(sequences(lengths=(20,)), max_tokens=100)
    with started(kind, folder) as backend:
        backend.step(shares(kind, sequences(0)), learning_rate=LEARNING_RATE)
        exported = weights(backend)
        logprobs = forward(backend, kind, packed)
        backend.step(shares(kind, sequences(1)), learning_rate=LEARNING_RATE)
    save_file(exported, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    np.testing.assert_allclose(expected_logprobs(hugging_face(tmp_path), packed.tokens), logprobs, atol=1e-4)


@and_ranks
def test_a_batch_that_is_not_finite_is_skipped(kind: str, folder: Path) -> None:
    good = sequences()
    bad = [*good[:-1], dataclasses.replace(good[-1], advantages=np.full_like(good[-1].advantages, np.nan))]
    with started(kind, folder) as backend:
        before = weights(backend)
        metrics = backend.step(shares(kind, bad), learning_rate=LEARNING_RATE).metrics
        assert metrics["learner/skipped_steps"] == 1.0
        assert math.isnan(metrics["loss"])
        assert distance(weights(backend), before) == 0.0
        assert backend.step(shares(kind, good), learning_rate=LEARNING_RATE).metrics["learner/skipped_steps"] == 0.0
        after_both = weights(backend)
    with started(kind, folder) as backend:
        backend.step(shares(kind, good), learning_rate=LEARNING_RATE)
        assert distance(weights(backend), after_both) == 0.0


@and_ranks
def test_micro_batches_without_response_tokens_train_nothing(kind: str, folder: Path) -> None:
    with started(kind, folder) as backend:
        before = weights(backend)
        nothing: list[list[object]] = [[empty()] for _ in range(num_shares(kind))]
        metrics = backend.step(nothing, learning_rate=LEARNING_RATE).metrics  # type: ignore[arg-type]
        assert (metrics["loss"], metrics["grad_norm"], metrics["learner/skipped_steps"]) == (0.0, 0.0, 0.0)
        backend.step([[] for _ in range(num_shares(kind))], learning_rate=LEARNING_RATE)
        after = weights(backend)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after}
    assert max(value for name, value in moved.items() if before[name].ndim == 1) == 0.0
    # Two steps of weight decay alone: w (1 - lr x decay)^2, which moves w by at most 2 x 0.002 x 0.1 x |w|.
    assert max(moved.values()) <= 4.1e-4 * max(float(tensor.abs().max()) for tensor in before.values())


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_rank_without_sequences_does_not_matter(folder: Path) -> None:
    (item,) = sequences(lengths=(20,))
    with started("reference", folder) as backend:
        expected = backend.step(shares("reference", [item]), learning_rate=LEARNING_RATE).metrics
    with started("megatron-2", folder) as backend:
        cut = pack_for_ranks([item], ranks=2, max_tokens=100)
        metrics = learned(backend.step(cut, learning_rate=LEARNING_RATE).metrics)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-4)


@and_ranks
def test_a_wrong_number_of_shares_is_an_error(kind: str, folder: Path) -> None:
    with started(kind, folder) as backend, pytest.raises(BackendError, match="3"):
        backend.step([[], [], []], learning_rate=LEARNING_RATE)


def test_bfloat16_trains_close_to_float32(kind: str, folder: Path) -> None:
    """bfloat16 logprobs (8 bits) are off by a few hundredths here; weights move by at most the learning rate."""
    results = {}
    for dtype in ("float32", "bfloat16"):
        with started(kind, folder, dtype=dtype) as backend:
            metrics = backend.step(shares(kind, sequences()), learning_rate=LEARNING_RATE).metrics
            results[dtype] = (metrics, weights(backend))
    metrics, exported = results["bfloat16"]
    assert metrics["loss"] == pytest.approx(results["float32"][0]["loss"], abs=0.02)
    assert metrics["grad_norm"] == pytest.approx(results["float32"][0]["grad_norm"], rel=0.1)
    # In bfloat16 a weight near 1 has a spacing of 2^-8; add the learning rate for each of the two steps.
    assert distance(exported, results["float32"][1]) < 2**-7 * 2 + 2 * LEARNING_RATE


def test_small_steps_add_up_in_bfloat16(kind: str, folder: Path) -> None:
    """A weight near 1 moves by 2.5e-4 per step in its float32 copy; a single step is below bfloat16's spacing of
    2^-8."""
    item = sequences(lengths=(30, 30))
    with started(kind, folder, dtype="bfloat16") as backend:
        before = weights(backend)
        for _ in range(24):
            backend.step(shares(kind, item), learning_rate=2.5e-4)
        after = weights(backend)
    name = "model.norm.weight"
    assert float((after[name] - before[name]).abs().max()) > 2**-8


@pytest.mark.parametrize(
    "kind",
    [*KINDS, *(pytest.param(kind, marks=RANKS) for kind in ("megatron-cp2", "megatron-pp2"))],
    indirect=True,
)
def test_a_step_tells_what_it_thought_of_the_tokens_of_recorded_sequences(kind: str, folder: Path) -> None:
    """The metrics describe the policy before the update, and only the tokens that it trains, whichever rank trains
    them."""
    batch = sequences()
    (recorded,) = recording([shares(kind, batch)], (1, 4, 5))
    model = hugging_face(folder)
    with started(kind, folder, temperature=0.7) as backend:
        result = backend.step(recorded, learning_rate=LEARNING_RATE)
        again = backend.step(shares(kind, batch), learning_rate=LEARNING_RATE)
        assert forward(backend, kind, pack(batch, max_tokens=1000)[0]).size  # no rank has unreported metrics left
    assert sorted(result.tokens) == [1, 4, 5]
    assert not again.tokens
    for number, (logprobs, entropies) in result.tokens.items():
        trained = batch[number].response_mask.copy()
        trained[0] = False
        ids = torch.from_numpy(batch[number].tokens.astype(np.int64))
        distribution = torch.log_softmax(model(ids[None]).logits[0, :-1].detach() / 0.7, -1)
        expected = distribution.gather(-1, ids[1:, None])[:, 0].numpy()[trained[1:]]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        expected = -(distribution.exp() * distribution).sum(-1).numpy()[trained[1:]]
        np.testing.assert_allclose(entropies, expected, atol=1e-4)
