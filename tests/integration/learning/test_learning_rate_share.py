"""staleness.learning_rate: a step's learning rate follows the ESS of its own batch, in every backend."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import empty
from asyncrl.policies.corrections import diagnostics
from tests.harness.backends import (
    KINDS,
    KINDS_AND_RANKS,
    LEARNING_RATE,
    distance,
    num_shares,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)


def scaled(rule: str) -> Algorithm:
    return dataclasses.replace(resolve(ALGORITHMS["grpo"]), learning_rate_rule=rule)


def totals(ratios: list[float]) -> diagnostics.Sums:
    """Return the sums of one-token sequences with these ratios."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    return diagnostics.sequence_sums(
        logprobs=log_ratio,
        behavior_logprobs=torch.zeros_like(log_ratio),
        weights=torch.ones_like(log_ratio),
        sequence=torch.arange(len(ratios)),
        num_sequences=len(ratios),
    )


def test_the_share_is_the_ess_of_untruncated_sequence_ratios_or_its_root() -> None:
    # (1 + 3)^2 / (1 + 9) = 1.6 of 2 sequences. A correction would cap the ratio of 3 at 2; the share does not.
    assert scaled("linear").learning_rate_share(totals([1.0, 3.0])) == pytest.approx(0.8)
    assert scaled("sqrt").learning_rate_share(totals([1.0, 3.0])) == pytest.approx(math.sqrt(0.8))
    assert scaled("").learning_rate_share(totals([1.0, 3.0])) == 1.0


def test_micro_batches_are_summed_before_the_share_is_taken() -> None:
    parts = totals([1.0]) + totals([3.0])  # alone, each part would have its full ESS
    assert scaled("linear").learning_rate_share(parts) == pytest.approx(0.8)


def test_fresh_data_and_no_data_get_the_whole_learning_rate() -> None:
    assert scaled("linear").learning_rate_share(totals([1.0, 1.0, 1.0])) == pytest.approx(1.0)
    assert scaled("linear").learning_rate_share(diagnostics.zero()) == 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", KINDS_AND_RANKS)
def test_a_step_is_one_at_the_learning_rate_its_batch_is_worth(kind: str, folder: Path) -> None:
    batch = sequences()
    with started(kind, folder) as backend:
        start = weights(backend)
        plain = backend.step(shares(kind, batch), learning_rate=LEARNING_RATE).metrics
        unscaled = weights(backend)
    assert plain["learner/learning_rate"] == LEARNING_RATE
    share = math.sqrt(plain["offpolicy/sequence_ess"])
    assert share < 0.9
    with started(kind, folder) as backend:
        backend.step(shares(kind, batch), learning_rate=LEARNING_RATE * share)
        expected = weights(backend)
    with started(kind, folder, algorithm=scaled("sqrt")) as backend:
        metrics = backend.step(shares(kind, batch), learning_rate=LEARNING_RATE).metrics
        assert distance(weights(backend), expected) < 1e-7
    assert metrics["learner/learning_rate"] == pytest.approx(LEARNING_RATE * share)
    assert distance(expected, start) < 0.95 * distance(unscaled, start)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_response_tokens_is_a_step_all_the_same(kind: str, folder: Path) -> None:
    with started(kind, folder, algorithm=scaled("linear")) as backend:
        metrics = backend.step([[empty()] for _ in range(num_shares(kind))], learning_rate=LEARNING_RATE).metrics
    assert (metrics["learner/learning_rate"], metrics["learner/skipped_steps"]) == (LEARNING_RATE, 0.0)
