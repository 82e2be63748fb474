"""A loss over the whole vocabulary gets the logits of every token, in every backend and layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.messages.likeliest import Likeliest
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks
from asyncrl.policies.losses.centered import ScoreCentered
from asyncrl.policies.losses.distillation import Distill
from asyncrl.policies.losses.loss import Loss, never
from tests.harness.backends import (
    KINDS,
    RANKS,
    SETTINGS,
    VOCABULARY,
    distance,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.prefixes import trees

GENTLE = dataclasses.replace(SETTINGS, eps=0.1)
TEMPERATURE = 0.7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfLogits(Loss):
    """-logprob - 0.5 entropy, both from the logits."""

    name = "of_logits"

    def formula(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits.shape == (len(tokens), VOCABULARY)
        distribution = logits.log_softmax(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        loss = -distribution.gather(-1, tokens[:, None])[:, 0] - 0.5 * entropy
        return loss, never(loss)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfOutputs(Loss):
    """The same from what every loss gets."""

    name = "of_outputs"

    def formula(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = -logprobs - 0.5 * entropy
        return loss, never(loss)


def trained(
    kind: str, folder: Path, loss: Loss, rows: list[list[MicroBatch]] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    algorithm: Algorithm = dataclasses.replace(resolve(ALGORITHMS["sft"]), loss=loss)
    with started(kind, folder, algorithm=algorithm, optimizer=GENTLE, temperature=TEMPERATURE) as backend:
        result = backend.step(rows or shares(kind, sequences()), learning_rate=0.1)
        return weights(backend), {name: result.metrics[name] for name in ("loss", "entropy", "grad_norm")}


def with_likeliest(batch: list[TrainingSequence]) -> list[TrainingSequence]:
    """Give each place five tokens of falling probability, other ones for the teacher."""
    random = np.random.default_rng(0)

    def some(one: TrainingSequence) -> Likeliest:
        chosen = np.stack([random.permutation(VOCABULARY)[:5] for _ in one.tokens]).astype(np.int32)
        falling = np.log([0.4, 0.2, 0.1, 0.1, 0.05]).astype(np.float32)
        return Likeliest(tokens=chosen, logprobs=np.broadcast_to(falling, chosen.shape))

    return [
        dataclasses.replace(one, likeliest={"behavior_likeliest": some(one), "teacher_likeliest": some(one)})
        for one in batch
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tied=False)


OF_KINDS = pytest.mark.parametrize(
    "kind",
    [*KINDS[:1], "megatron-1", *(pytest.param(k, marks=RANKS) for k in ("megatron-tp2", "megatron-cp2"))],
)


@OF_KINDS
def test_a_loss_of_the_logits_trains_as_the_same_loss_of_logprobs_and_entropy(kind: str, folder: Path) -> None:
    expected, its_metrics = trained("reference", folder, OfOutputs())
    made, metrics = trained(kind, folder, OfLogits())
    assert metrics == pytest.approx(its_metrics, rel=1e-4)
    assert distance(made, expected) < 1e-5


@OF_KINDS
@pytest.mark.parametrize("loss", [ScoreCentered(cap=1.5), Distill()], ids=["score_centered", "distill"])
def test_the_likeliest_tokens_of_every_place_reach_the_loss_however_a_batch_is_cut(
    kind: str, loss: Loss, folder: Path
) -> None:
    """Against one row of all sequences in the reference."""
    batch = with_likeliest(sequences())
    expected, its_metrics = trained("reference", folder, loss, shares("reference", batch, max_tokens=1000))
    made, metrics = trained(kind, folder, loss, shares(kind, batch))
    assert its_metrics["grad_norm"] > 1e-3
    assert metrics == pytest.approx(its_metrics, rel=1e-4)
    assert distance(made, expected) < 1e-5


def test_answers_that_share_tokens_have_the_logits_of_each_of_their_own(folder: Path) -> None:
    made = trees(3)
    rows = pack_for_ranks(made, ranks=1, max_tokens=1000, shares_prefixes=True)
    assert len(rows[0][0].shared)
    expected, its_metrics = trained("megatron-1", folder, OfOutputs(), rows)
    got, metrics = trained("megatron-1", folder, OfLogits(), rows)
    assert metrics == pytest.approx(its_metrics, rel=1e-4)
    assert distance(got, expected) < 1e-5
