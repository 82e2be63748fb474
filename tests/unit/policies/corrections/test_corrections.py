"""Corrections: values computed by hand, properties of all corrections, and their composition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.contrib.losses.corrections import OPSM, BinaryKL, KStat, OutlierMask
from asyncrl.errors import ConfigError
from asyncrl.policies.corrections.chains import chain, is_uncorrected, norm_level, weights
from asyncrl.policies.corrections.correction import (
    Correction,
    CorrectionInputs,
    geometric_ratio,
    prefix_ratio,
    ratio,
    sequence_ratio,
)
from asyncrl.policies.corrections.masks import SequenceMask, TokenMask, Veto
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.corrections.weights import TISToken

RATIOS = torch.tensor([0.5, 2.0, 4.0, 0.1, 1.0], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 0, 2, 2, 2])  # the second of three sequences has no tokens
SEGMENTS: dict[str, Any] = {"sequence": SEQUENCE, "num_sequences": 3}


def inputs(log_ratio: Any, **changes: Any) -> CorrectionInputs:
    ones = -np.ones(len(log_ratio))
    fields = {"log_ratio": log_ratio, "advantages": ones, "behavior_logprobs": ones, "mean_weight": 1.0, **SEGMENTS}
    fields |= changes
    return CorrectionInputs(**fields)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_sequence_ratios_are_products_and_geometric_means_of_the_tokens() -> None:
    # 0.5 x 2 = 1; no tokens: 1; 4 x 0.1 x 1 = 0.4
    torch.testing.assert_close(sequence_ratio(RATIOS.log(), **SEGMENTS), RATIOS.new_tensor([1, 1, 0.4]))
    expected = RATIOS.new_tensor([1, 1, 0.4 ** (1 / 3)])
    torch.testing.assert_close(geometric_ratio(RATIOS.log(), **SEGMENTS), expected)


def test_the_prefix_ratio_starts_anew_in_each_sequence() -> None:
    expected = RATIOS.new_tensor([0.5, 1.0, 4.0, 0.4, 0.4])
    torch.testing.assert_close(prefix_ratio(RATIOS.log(), **SEGMENTS), expected)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("tis_token", [0.5, 2, 2, 0.1, 1]),
        ("clamp", [0.5, 2, 4, 0.5, 1]),
        ("tis_sequence", [1, 1, 0.4, 0.4, 0.4]),
        ("tis_prefix", [0.5, 1, 2, 0.4, 0.4]),
        ("mis_token", [0.5, 2, 0, 0.1, 1]),
        ("mis_sequence", [1, 1, 0.4, 0.4, 0.4]),
        ("icepop", [0.5, 2, 4, 0, 1]),
        ("geo_mask", [1, 1, 0, 0, 0]),
        ((Veto(threshold=0.2),), [1, 1, 0, 0, 0]),
        ((OutlierMask(low=0.0, high=3.0),), [1, 1, 0, 0, 0]),
        ("opsm", [1, 1, 1, 1, 1]),  # the means of -log ratio are 0 and 0.31, delta is 0.5
        ((OPSM(delta=0.3),), [1, 1, 0, 0, 0]),
        ((KStat(statistic="k1", over="sum", high=0.5),), [1, 1, 0, 0, 0]),
        ((KStat(statistic="k2", over="token", high=1.0),), [1, 1, 1, 0, 1]),
        ("token_mask", [1, 1, 1, 0, 1]),
        ("sequence_mask", [1, 1, 0, 0, 0]),
        ((TISToken(), TokenMask(low=0.5, high=3.0)), [0.5, 2, 0, 0, 1]),
        ((TISToken(), SequenceMask(low=0.3)), [0.5, 2, 2, 0.1, 1]),
        ("tis_token + geo_mask + veto", [0.5, 2, 0, 0, 0]),
        ((TISToken(), Veto(threshold=0.2)), [0.5, 2, 0, 0, 0]),
    ],
)
def test_weights_by_hand(spec: Any, expected: list[float]) -> None:
    found = weights(chain(spec), inputs(RATIOS.log()))
    torch.testing.assert_close(found, RATIOS.new_tensor(expected))


@pytest.mark.parametrize(("delta", "expected"), [(5e-3, [1, 1, 0, 0, 0]), (0.015, [1, 1, 1, 1, 1])])
def test_a_sequence_is_rejected_by_its_mean_binary_kl(delta: float, expected: list[float]) -> None:
    """Of 0.5 -> 0.6: .5 ln(5 / 6) + .5 ln(5 / 4) = 0.0204, and 0 for the others; 1e-6 -> 4e-6 is 3e-6 for ratio 4."""
    behavior = torch.tensor([1e-6, 0.3, 0.5, 0.2, 0.7], dtype=torch.float64).log()
    policy = torch.tensor([4e-6, 0.3, 0.6, 0.2, 0.7], dtype=torch.float64).log()
    of_two = torch.tensor([0, 0, 1, 1, 1])
    given = inputs(policy - behavior, behavior_logprobs=behavior, sequence=of_two, num_sequences=2)
    found = weights((BinaryKL(delta=delta),), given)
    torch.testing.assert_close(found, found.new_tensor(expected))


def test_the_binary_kl_to_a_certain_policy_is_finite_as_in_its_source() -> None:
    """1 - 1e-4 -> 1, which counts as 1 - 1e-6: 1e-4 ln 100 - 1e-4 = 3.6e-4. An impossible token counts as 1e-6."""
    behavior = torch.tensor([1 - 1e-4, 0.5], dtype=torch.float64).log()
    policy = torch.tensor([1.0, 0.0], dtype=torch.float64).log()
    given = inputs(policy - behavior, behavior_logprobs=behavior, sequence=torch.tensor([0, 1]), num_sequences=2)
    assert weights((BinaryKL(delta=4e-4),), given).tolist() == [1, 0]
    assert weights((BinaryKL(delta=3e-4),), given).tolist() == [0, 0]
    assert weights((BinaryKL(delta=6.3),), given).tolist() == [1, 1]  # .5 ln .5e6 + .5 ln .5 = 6.2


def test_the_sum_of_a_long_sequence_is_clamped_as_one_number() -> None:
    # 60 tokens of log ratio 0.5 sum to 30, which is clamped to 20; each token alone is far from the limit.
    log_ratio = torch.full((60,), 0.5)
    found = sequence_ratio(log_ratio, sequence=torch.zeros(60, dtype=torch.int64), num_sequences=1)
    assert found.item() == pytest.approx(math.exp(20), rel=1e-5)


# -- all corrections ---------------------------------------------------------------------------------------------------

log_ratios = st.lists(
    st.one_of(st.floats(-30, 30), st.sampled_from([math.inf, -math.inf, 1e30, -1e30, 0.0])), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", CORRECTIONS)
@given(values=log_ratios, cuts=st.sets(st.integers(1, 11)))
def test_weights_are_finite_not_negative_and_without_gradient_whatever_the_ratios(
    name: str, values: list[float], cuts: set[int]
) -> None:
    log_ratio = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    sequence = torch.tensor([sum(cut <= index for cut in cuts) for index in range(len(values))])
    found = weights(chain(name), inputs(log_ratio, sequence=sequence, num_sequences=len(cuts) + 1))
    assert found.shape == log_ratio.shape
    assert torch.isfinite(found).all()
    assert (found >= 0).all()
    assert not found.requires_grad
    assert found.dtype == torch.float32


@pytest.mark.parametrize("name", CORRECTIONS)
def test_numpy_and_torch_agree(name: str) -> None:
    log_ratio = RATIOS.log()
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    of_numpy = weights(
        chain(name), inputs(log_ratio.numpy(), sequence=SEQUENCE.numpy(), advantages=advantages, num_sequences=3)
    )
    of_torch = weights(chain(name), inputs(log_ratio, advantages=torch.from_numpy(advantages)))
    torch.testing.assert_close(of_numpy, of_torch)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_tokens_give_no_weights(name: str) -> None:
    nothing = torch.zeros(0)
    found = weights(chain(name), inputs(nothing, sequence=torch.zeros(0, dtype=torch.int64), num_sequences=2))
    assert found.shape == (0,)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_fresh_tokens_count_one(name: str) -> None:
    assert weights(chain(name), inputs(torch.zeros(5))).tolist() == [1.0] * 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_a_sequence_weighs_does_not_depend_on_its_neighbours(name: str) -> None:
    log_ratio = RATIOS.log()
    together = weights(chain(name), inputs(log_ratio))
    apart = [
        weights(
            chain(name),
            inputs(log_ratio[part], sequence=torch.zeros(len(log_ratio[part]), dtype=torch.int64), num_sequences=1),
        )
        for part in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(together, torch.cat(apart))


@given(log_ratios, st.floats(0.1, 10))
def test_truncation_never_gives_more_than_the_ratio_or_the_cap(values: list[float], cap: float) -> None:
    log_ratio = torch.tensor(values, dtype=torch.float64)
    found = TISToken(cap=cap).formula(log_ratio)
    assert (found <= ratio(log_ratio)).all()
    assert (found <= cap).all()


# -- chains ------------------------------------------------------------------------------------------------------------


def test_masks_commute_with_the_weight() -> None:
    one, other = (weights(chain(spec), inputs(RATIOS.log())) for spec in ("tis_token+veto", "veto + tis_token"))
    torch.testing.assert_close(one, other)


class Half(Correction):
    def formula(self, log_ratio: Any) -> torch.Tensor:
        return torch.full_like(log_ratio, 0.5)


def test_a_correction_of_one_s_own_joins_a_chain_by_its_address() -> None:
    with pytest.raises(ConfigError, match="must be a dataclass"):
        chain(f"{__name__}:Half + veto")
    globals()["Mine"] = dataclass(frozen=True, slots=True, kw_only=True)(Half)
    assert weights(chain(f"{__name__}:Mine + veto"), inputs(RATIOS.log())).tolist() == [0.5] * 5


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("tis", "must be one of none, tis_token.* did you mean 'tis_token'"),
        ("tis_tokn", "did you mean 'tis_token'"),
        ("", "must be one of"),
        ([], "is empty"),
        ("tis_token + tis_sequence", "weights with the ratio twice"),
        ("veto + veto", "names one correction twice"),
        ("self_norm + tis_token", "must come last"),
        ("asyncrl.contrib.losses.sapo:SAPO", "must derive from asyncrl.policies.corrections.correction.Correction"),
    ],
)
def test_a_wrong_chain_is_refused_with_the_reason(spec: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        chain(spec)


def test_self_normalisation_needs_the_batch_s_mean_weight() -> None:
    with pytest.raises(ValueError, match="self_norm needs mean_weight of the whole batch"):
        weights(chain("tis_token + self_norm"), inputs(RATIOS.log(), mean_weight=None))
    halved = weights(chain("tis_token + self_norm"), inputs(RATIOS.log(), mean_weight=2.0))
    torch.testing.assert_close(halved, TISToken().formula(RATIOS.log()) / 2)


def test_self_normalisation_is_over_what_the_weight_belongs_to() -> None:
    assert norm_level(chain("tis_token + veto")) is None
    assert norm_level(chain("tis_token + veto + self_norm")) == "token"
    assert norm_level(chain("mis_sequence + self_norm")) == "sequence"


def test_a_chain_knows_when_it_corrects_nothing() -> None:
    assert is_uncorrected(chain("none"))
    assert not is_uncorrected(chain("tis_token"))
    assert not is_uncorrected(chain("none + opsm"))
