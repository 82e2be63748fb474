"""Diagnostics: values computed by hand, and sums that do not depend on how a batch is split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.corrections import diagnostics
from asyncrl.policies.corrections.diagnostics import MAXIMA, SUMS, Sums

LENGTHS = (3, 1, 0, 4)


def columns(lengths: tuple[int, ...], *, seed: int = 0) -> dict[str, Any]:
    """Make the inputs of the three parts for sequences of these lengths."""
    generator = np.random.default_rng(seed)
    count = sum(lengths)
    return {
        "logprobs": torch.from_numpy(-generator.exponential(size=count)),
        "behavior": torch.from_numpy(-generator.exponential(size=count)),
        "weights": torch.from_numpy(generator.choice([0.0, 0.5, 1.0, 2.0], size=count)),
        "clipped": torch.from_numpy(generator.random(count) > 0.5),
        "entropy": torch.from_numpy(generator.random(count)),
        "staleness": torch.from_numpy(generator.integers(-1, 40, count)),
        "sequence": torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        "num_sequences": len(lengths),
    }


def total(batch: dict[str, Any]) -> Sums:
    log_ratio = batch["logprobs"] - batch["behavior"]
    return (
        diagnostics.token_sums(
            log_ratio=log_ratio,
            weights=batch["weights"],
            clipped=batch["clipped"],
            entropy=batch["entropy"],
            is_fresh=batch["staleness"] <= 0,
            loss=batch["logprobs"].sum(),
        )
        + diagnostics.sequence_sums(
            logprobs=batch["logprobs"],
            behavior_logprobs=batch["behavior"],
            weights=batch["weights"],
            sequence=batch["sequence"],
            num_sequences=batch["num_sequences"],
        )
        + diagnostics.divergence_sums(
            batch["logprobs"], model_outputs={f"{name}_logprobs": batch["behavior"] for name in ("ref", "teacher")}
        )
        + diagnostics.version_sums(
            log_ratio=log_ratio, weights=batch["weights"], clipped=batch["clipped"], staleness=batch["staleness"]
        )
    )


def part(batch: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """Return sequences first to last - 1 as a separate micro-batch."""
    chosen = (batch["sequence"] >= first) & (batch["sequence"] < last)
    cut = {name: value[chosen] for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return cut | {"sequence": cut["sequence"] - first, "num_sequences": last - first}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 100))
def test_sums_add_over_micro_batches_and_ranks(lengths: list[int], cut: int, seed: int) -> None:
    batch = columns(tuple(lengths), seed=seed)
    cut = min(cut, len(lengths))
    whole = total(batch)
    split = diagnostics.zero() + total(part(batch, 0, cut)) + total(part(batch, cut, len(lengths)))
    torch.testing.assert_close(whole.sums, split.sums)
    torch.testing.assert_close(whole.maxima, split.maxima)


def test_every_entry_is_filled_by_one_of_the_parts() -> None:
    whole = total(columns(LENGTHS) | {"staleness": torch.tensor([0, 0, 1, 2, 4, 8, 16, 99])})
    totals = dict(zip(SUMS, whole.sums.tolist(), strict=True))
    zeros = {name for name, value in totals.items() if value == 0 and "@" not in name}
    assert zeros <= {"rejected_sequences"}
    assert all(totals[f"tokens@{low}"] for low in diagnostics.BUCKETS)
    assert torch.isfinite(whole.maxima).all()
    assert len(whole.maxima) == len(MAXIMA)


def test_sequence_metrics_by_hand() -> None:
    # Two sequences: ratios (2, 0.5) with product 1, and (3) with product 3. ESS = (1 + 3)^2 / (1 + 9) = 1.6 of 2.
    ratios = torch.tensor([2.0, 0.5, 3.0], dtype=torch.float64)
    behavior = torch.full((3,), math.log(0.25), dtype=torch.float64)
    batch = columns((2, 1)) | {"logprobs": behavior + ratios.log(), "behavior": behavior}
    batch |= {"weights": torch.tensor([2.0, 0.5, 0.0], dtype=torch.float64)}
    found = diagnostics.metrics(total(batch))
    expected = {
        "offpolicy/sequence_ess_count": 1.6,
        "offpolicy/sequence_ess": 0.8,
        "offpolicy/sequence_ratio_max": 3.0,
        "offpolicy/ess_count": 2.5**2 / 4.25,
        "offpolicy/ess": 2.5**2 / 4.25 / 3,
        "offpolicy/chi2_sequence": (1 + 9) / 2 - 1,
        "offpolicy/chi2_token": (4 + 0.25 + 9) / 3 - 1,
        "offpolicy/ratio_max": 3.0,
        "offpolicy/ratio_min": 0.5,
        "offpolicy/masked_fraction": 1 / 3,
        "offpolicy/masked_sequences": 1 / 2,
        "mismatch/ratio_error": (2 + 2 + 3) / 3,
        "offpolicy/perplexity_behavior": 4.0,
        "offpolicy/perplexity_trainer": (4 + 4 / 3) / 2,
        "offpolicy/perplexity_ratio": (1 + 1 / 3) / 2,
        "offpolicy/nll_difference": -math.log(3) / 2,
        "offpolicy/nll_difference_max": 0.0,
        "offpolicy/nll_difference_min": -math.log(3),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_versions_are_told_apart_in_buckets_that_double() -> None:
    batch = columns((6,)) | {"staleness": torch.tensor([0, 1, 3, 2, 15, 16])}
    batch |= {"weights": torch.tensor([1.0, 1.0, 2.0, 0.0, 1.0, 1.0], dtype=torch.float64)}
    found = diagnostics.metrics(total(batch))
    tokens = {low: found.get(f"offpolicy/staleness_{low}/tokens") for low in diagnostics.BUCKETS}
    assert tokens == {0: 1, 1: 1, 2: 2, 4: None, 8: 1, 16: 1}
    assert found["offpolicy/staleness_2/ess"] == pytest.approx(0.5)  # (2 + 0)^2 / 4 / 2 tokens
    assert found["offpolicy/staleness_2/masked_fraction"] == pytest.approx(0.5)


def test_equal_weights_are_all_effective_and_one_of_many_is_one() -> None:
    assert diagnostics.effective_samples(4.0, 4.0) == 4.0
    assert diagnostics.effective_samples(1000.0, 1000.0**2) == 1.0
    assert diagnostics.effective_samples(0.0, 0.0) == 0.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_effective_samples_do_not_depend_on_the_weights_scale_or_order(values: list[float], scale: float) -> None:
    weights = np.array(values)
    count = diagnostics.effective_samples(weights.sum(), np.square(weights).sum())
    scaled = np.sort(weights) * scale
    assert 1 - 1e-9 <= count <= len(values) * (1 + 1e-9)
    assert diagnostics.effective_samples(scaled.sum(), np.square(scaled).sum()) == pytest.approx(count)


def test_the_mean_weight_is_over_tokens_or_over_sequences() -> None:
    # Sequences of three tokens and of one token, with weights 1, 1, 1 and 3.
    batch = columns((3, 1)) | {"weights": torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64)}
    totals = total(batch)
    assert diagnostics.mean_weight(totals) == pytest.approx(6 / 4)
    assert diagnostics.mean_weight(totals, level="sequence") == pytest.approx(2.0)
    assert diagnostics.mean_weight(diagnostics.zero()) == 1.0


def test_divergences_are_never_negative_and_vanish_where_nothing_differs() -> None:
    log_ratio = torch.linspace(-30, 30, 61, dtype=torch.float64)
    for divergence in (diagnostics.k3_of(log_ratio), diagnostics.k3_of(-log_ratio), diagnostics.js_of(log_ratio)):
        assert (divergence >= 0).all()
        assert divergence[30] == 0
        assert torch.isfinite(divergence).all()


def test_what_was_not_summed_is_not_reported() -> None:
    batch = columns(LENGTHS)
    tokens_only = diagnostics.token_sums(
        log_ratio=batch["logprobs"] - batch["behavior"],
        weights=batch["weights"],
        clipped=batch["clipped"],
        entropy=batch["entropy"],
        is_fresh=batch["staleness"] <= 0,
        loss=torch.tensor(0.0),
    )
    names = set(diagnostics.metrics(tokens_only))
    assert "offpolicy/sequence_ess" not in names
    assert not [name for name in names if "staleness_" in name]
    assert all(math.isfinite(value) for value in diagnostics.metrics(diagnostics.zero()).values())


def test_the_entropy_of_importance_weighted_samples_is_the_exact_one_in_expectation() -> None:
    # Three outcomes: sum over behavior of ratio x -log p = sum of -p log p.
    trainer, behavior = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    estimate = (behavior * diagnostics.importance_entropy(trainer.log(), behavior.log())).sum()
    torch.testing.assert_close(estimate, -(trainer * trainer.log()).sum())
