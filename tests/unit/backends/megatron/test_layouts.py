"""Every way to split a model, its rows and the batch among ranks trains the same as one process.

Each layout starts once: its ranks score, take two steps, and return to their checkpoint. The tests compare the results.
AdamW's eps is large here. With a usual eps, AdamW's step is nearly a sign, which hides a gradient that is off by a
factor.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from asyncrl.engines.validation import check_weights
from asyncrl.messages import WeightVersion
from asyncrl.policies.batching.packing import MicroBatch, pack_for_ranks, sequence_slices
from asyncrl.tensors import weight_files
from asyncrl.tensors.model_tensors import read_shapes
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.nccl import Sender
from tests.harness.backends import (
    LAYOUTS,
    SETTINGS,
    critic,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    learned,
    num_shares,
    parts,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
    with_returns,
)
from tests.harness.backends import cut as sampled_from_few
from tests.harness.packing import pack
from tests.harness.prefixes import trees
from tests.harness.transfers import copied

EXPLORES = bool(os.environ.get("ASYNCRL_EXPLORE"))
LEARNING_RATE = 0.05
GENTLE = dataclasses.replace(SETTINGS, eps=0.1, max_grad_norm=1e6)

QUICK = (("megatron-pp2", "qwen3", {}), ("megatron-tp2-ep2", "qwen3_moe", {}))
SLOW = (
    ("megatron-tp2-etp2", "qwen3_moe", {}),
    ("megatron-cp2-tp2", "gemma3", {}),
    ("megatron-vpp2", "gemma3", {}),  # half of the layers have windows; a tied embedding has a copy at either end
    ("megatron-pp2-dp2", "qwen2", {"distributed_optimizer": False}),
    ("megatron-pp2-ep2", "qwen3_next", {"recompute": "full"}),
    ("megatron-cp2-ep2", "deepseek_v3", {"recompute": "full"}),
    ("megatron-cp2-ep2", "qwen3_next", {}),
)
"""Every way to split, with another one or two."""
MORE = (
    ("megatron-ep2-etp2", "qwen2_moe", {}),
    ("megatron-etp2", "deepseek_v3", {}),
    ("megatron-ep2-dp2", "glm4_moe", {}),
    ("megatron-tp2-ep4", "gpt_oss", {"recompute": "selective"}),
    ("megatron-tp2-ep2", "minimax_m2", {}),
    ("megatron-tp2-ep2", "qwen3_5_moe", {}),
    ("megatron-cp2-tp2", "qwen3_5", {"recompute": "selective"}),
    ("megatron-cp4", "qwen3_5", {"recompute": "full"}),
    ("megatron-pp2-cp2", "qwen3_5", {}),
    ("megatron-tp2-ep2", "qwen2_moe", {}),
    ("megatron-tp2", "glm4", {}),
    ("megatron-tp2", "deepseek_v32", {}),
    ("megatron-cp2-ep2", "glm_moe_dsa", {"recompute": "full"}),
    ("megatron-cp2-tp2", "deepseek_v32", {"recompute": "selective"}),
    ("megatron-pp2-ep2", "glm_moe_dsa", {}),
    ("megatron-cp2-ep2", "gpt_oss", {}),
    ("megatron-cp2", "qwen3", {}),
    ("megatron-tp2", "qwen3", {}),
    ("megatron-vpp2", "qwen3", {}),
    ("megatron-cp4", "qwen3", {}),
    ("megatron-cp2-dp2", "qwen3", {}),
    ("megatron-pp2-dp2", "qwen3", {}),
    ("megatron-pp2-cp2", "qwen3", {}),
    ("megatron-pp2-tp2", "qwen3", {}),
    ("megatron-pp2", "qwen2", {"recompute": "full"}),
    ("megatron-cp2", "qwen3", {"distributed_optimizer": False}),
    ("megatron-ep2", "qwen3_moe", {}),
    ("megatron-ep2", "qwen3_moe", {"distributed_optimizer": False}),
    ("megatron-tp2", "qwen3_moe", {}),
    ("megatron-tp2-ep2", "glm4_moe", {}),
    ("megatron-pp2-ep2", "deepseek_v3", {}),
    ("megatron-tp2-ep4", "qwen3_moe", {}),
    ("megatron-tp2", "gpt_oss", {}),
    ("megatron-pp2-ep2", "gpt_oss", {}),
    ("megatron-tp2-ep4-dp2", "qwen3_moe", {"recompute": "full"}),
    ("megatron-pp2-ep4", "qwen3_moe", {}),
)
"""Only with ASYNCRL_EXPLORE=1, as nightly runs set it."""
TRIED = (*QUICK, *SLOW, *(MORE if EXPLORES else ()))
OF_FOUR_LAYERS = {architecture for kind, architecture, _ in TRIED if LAYOUTS[kind].pipeline > 1} - {"qwen3_next"}
"""Families that are split by layers: two stages of two pieces. Two layers hold every kind of the other families; of
qwen3_next, linear attention is the first stage and attention the second."""


def name(kind: str, architecture: str, options: Mapping[str, Any]) -> str:
    return "-".join([kind.removeprefix("megatron-"), architecture, *map(str, options.values())])


@dataclasses.dataclass(frozen=True)
class Done:
    """Results of a backend: logprobs of one row; weights before training, by rank, as published, and as a colocated
    engine copies them from the ranks' memory; metrics and weights
    after each step; the critic's values; the weights after the last step repeated from the checkpoint before it; and
    metrics and weights after one more step, on sequences that share prefixes, which the reference computes whole."""

    logprobs: NDArray[np.float32]
    before: Mapping[str, torch.Tensor]
    parts: Sequence[Mapping[str, torch.Tensor]]
    version: WeightVersion
    copied: Mapping[str, torch.Tensor]
    metrics: list[Mapping[str, float]]
    after: list[Mapping[str, torch.Tensor]]
    values: NDArray[np.float32]
    again: Mapping[str, torch.Tensor]
    shared: tuple[Mapping[str, float], Mapping[str, torch.Tensor]]


MORE_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""Linear attention that four ranks can share."""


def row() -> MicroBatch:
    (packed,) = pack(sequences(), max_tokens=1000)
    return packed


def done(kind: str, folder: Path, saved: Path, **options: Any) -> Done:
    auxiliary = {"critic": dataclasses.replace(critic(folder), optimizer=GENTLE)}
    settings: dict[str, Any] = {"optimizer": GENTLE, "auxiliary": auxiliary}
    with started(kind, folder, **settings, **({"options": options} if options else {})) as backend:

        def cut(number: int) -> list[list[MicroBatch]]:
            """Micro-batches of different lengths, several for each rank."""
            batch = sequences(number)
            return shares(kind, sampled_from_few(batch) if number else batch, max_tokens=45)

        def step(number: int) -> dict[str, float]:
            metrics = learned(backend.step(cut(number), learning_rate=LEARNING_RATE).metrics)
            of_critic = backend.step(with_returns(cut(number)), learning_rate=LEARNING_RATE, model="critic").metrics
            return metrics | dict(of_critic)

        logprobs, before, exported = forward(backend, kind, row()), weights(backend), backend.export()
        channel = FilesChannel(saved / "weights", keep=2, model_path=folder)
        version = channel.publish(exported, incarnation=0, policy_version=1)
        sender = Sender("127.0.0.1")
        sender.set_weights(exported, incarnation=0, policy_version=1)
        taken = copied(sender)
        metrics, after = [step(0)], [weights(backend)]
        backend.save(saved)
        metrics.append(step(1))
        after.append(weights(backend))
        values = forward(backend, kind, row(), model="critic")
        backend.restore(saved)
        backend.step(cut(1), learning_rate=LEARNING_RATE)
        again = weights(backend)
        sharing = pack_for_ranks(trees(num_sequences=20), ranks=num_shares(kind), max_tokens=45, shares_prefixes=True)
        assert all(any(len(one.shared) for one in share) for share in sharing)
        shared = learned(backend.step(sharing, learning_rate=LEARNING_RATE).metrics), weights(backend)
        return Done(logprobs, before, parts(exported), version, taken, metrics, after, values, again, shared)


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    folder: Path
    expected: Done
    got: Done


CASES = [
    *(pytest.param(case, id=name(*case)) for case in QUICK),
    *(pytest.param(case, id=name(*case), marks=pytest.mark.slow) for case in (*SLOW, *(MORE if EXPLORES else ()))),
]
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[Path, Done]]:
    """References by architecture."""
    return {}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    references: dict[str, tuple[Path, Done]],
) -> Case:
    kind, architecture, options = request.param
    if architecture not in references:
        made = tmp_path_factory.mktemp("model")
        entries = MORE_HEADS if architecture == "qwen3_5" else None
        num_layers = 4 if architecture in OF_FOUR_LAYERS else 2
        tied = architecture == "qwen2"
        tiny_model(made, architecture=architecture, tied=tied, num_layers=num_layers, entries=entries)
        references[architecture] = (made, done("reference", made, tmp_path_factory.mktemp("saved")))
    folder, expected = references[architecture]
    return Case(kind, folder, expected, done(kind, folder, tmp_path_factory.mktemp("saved"), **options))


def test_outputs_are_those_of_transformers_sequence_by_sequence(case: Case) -> None:
    packed, model = row(), hugging_face(case.folder)
    for where in sequence_slices(packed):
        np.testing.assert_allclose(case.got.logprobs[where], expected_logprobs(model, packed.tokens[where]), atol=1e-5)


def test_an_export_gives_back_the_folder_bit_for_bit(case: Case) -> None:
    original = load_file(case.folder / "model.safetensors")
    assert case.got.before.keys() == original.keys()
    assert all(torch.equal(case.got.before[weight], tensor) for weight, tensor in original.items())


def test_ranks_publish_a_version_without_gathering_the_model(case: Case) -> None:
    """Each rank holds its share and at most one more parameter. An engine finds every tensor in the folder."""
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in case.got.parts]
    assert len(sizes) == LAYOUTS[case.kind].exporters
    largest = max(tensor.nbytes for tensor in case.got.before.values())
    assert max(sizes) - min(sizes) <= sum(sizes) / LAYOUTS[case.kind].pipeline / 4 + largest
    folder = check_weights(case.got.version, expected=read_shapes(case.folder))
    weight_files.verify(folder, sha256=case.got.version.sha256, num_bytes=case.got.version.num_bytes)
    assert len(weight_files.paths(folder)) == len(sizes)
    read = {name: tensor for path in weight_files.paths(folder) for name, tensor in load_file(path).items()}
    assert distance(read, dict(case.got.before)) == 0.0


def test_a_colocated_engine_copies_every_tensor_from_the_rank_that_has_it(case: Case) -> None:
    assert distance(dict(case.got.copied), dict(case.got.before)) == 0.0


def test_steps_make_the_metrics_and_the_weights_of_one_process(case: Case) -> None:
    """Loss, entropy, every diagnostic and the gradient norm: each token and each gradient counts once."""
    before: Mapping[str, torch.Tensor] = case.expected.before
    for got, expected, after, wanted in zip(
        case.got.metrics, case.expected.metrics, case.got.after, case.expected.after, strict=True
    ):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
        moved = distance(dict(before), dict(wanted))
        assert distance(dict(after), dict(wanted)) < 3e-4 * moved
        before = wanted


def test_critic_values_equal_one_process(case: Case) -> None:
    assert np.abs(case.expected.values).max() > 0.01
    np.testing.assert_allclose(case.got.values, case.expected.values, atol=1e-5)


def test_sequences_that_share_prefixes_make_the_metrics_and_the_weights_of_whole_ones(case: Case) -> None:
    (got, after), (expected, wanted) = case.got.shared, case.expected.shared
    assert got == pytest.approx(dict(expected), rel=1e-4, abs=1e-5)
    moved = distance(dict(case.expected.again), dict(wanted))
    assert distance(dict(after), dict(wanted)) < 3e-4 * moved


def test_step_after_restore_repeats_bit_for_bit(case: Case) -> None:
    assert distance(dict(case.got.again), dict(case.got.after[-1])) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "architecture", "other"),
    [
        ("megatron-pp2", "qwen2", "megatron-1"),
        ("megatron-tp2", "deepseek_v3", "megatron-ep2"),
        ("megatron-tp2-ep2", "qwen3_next", "megatron-vpp2"),
        ("megatron-ep2-etp2", "qwen3_moe", "megatron-ep2"),
        ("megatron-tp2-ep4-dp2", "qwen3_moe", "megatron-pp2-ep4"),
    ],
)
def test_checkpoint_moves_between_layouts(tmp_path: Path, kind: str, architecture: str, other: str) -> None:
    """Checkpoints number layers and experts as in the whole model, and store tied embeddings once."""
    folder = tiny_model(tmp_path / "model", architecture=architecture, tied=architecture == "qwen2", num_layers=4)

    def step(backend: Any, of: str, number: int) -> None:
        backend.step(shares(of, sequences(number), max_tokens=30), learning_rate=LEARNING_RATE)

    with started(kind, folder, optimizer=GENTLE) as backend:
        step(backend, kind, 0)
        backend.save(tmp_path / "many")
        step(backend, kind, 1)
        expected = weights(backend)
    with started(other, folder, optimizer=GENTLE) as backend:
        backend.restore(tmp_path / "many")
        backend.save(tmp_path / "other")
        step(backend, other, 1)
        assert distance(weights(backend), expected) < 1e-4
    with started(kind, folder, optimizer=GENTLE) as backend:
        backend.restore(tmp_path / "other")
        step(backend, kind, 1)
        assert distance(weights(backend), expected) == 0.0
