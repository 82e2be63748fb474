"""Exact bias and variance of every correction: 27 sequences are enumerated, and expectations replace samples.

Each row of KNOWN was computed with the dense formula in ``PLAIN``. That formula is written here from its definition and
shares no code with the corrections. Both must agree with each other and with the numbers to 1e-6. Where the reference
vector has the estimator, the numbers are the vector's.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.contrib.losses.corrections import OPSM, Clamp, KStat, OutlierMask, TISPrefix
from asyncrl.policies.corrections.chains import Chain, chain, weights
from asyncrl.policies.corrections.correction import CorrectionInputs
from asyncrl.policies.corrections.masks import GeoMask, SequenceMask, TokenMask, Veto
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.corrections.weights import (
    IcePop,
    MISSequence,
    MISToken,
    NoCorrection,
    TISGeometric,
    TISSequence,
    TISToken,
)
from tests import ROOT
from tests.harness.enumeration import Bias, Problem, problem

Floats = NDArray[np.float64]

VECTOR = next(
    vector
    for vector in json.loads((ROOT / "tests" / "data" / "oracles.json").read_text())["vectors"]
    if vector["formula"] == "exact_bias"
)


@pytest.fixture(scope="module")
def enumerated() -> Problem:
    inputs = VECTOR["inputs"]
    return problem(
        target=inputs["logits_theta"],
        behavior=inputs["logits_mu"],
        length=inputs["T"],
        reward=lambda tokens: float(sum(tokens) % 3 == 0),
        baseline=inputs["baseline"],
    )


def given(found: Problem, *, mean_weight: float | None = None) -> CorrectionInputs:
    return CorrectionInputs(
        log_ratio=found.flat_log_ratio,
        sequence=found.flat_sequence,
        num_sequences=len(found.sequences),
        advantages=found.flat_advantages,
        mean_weight=mean_weight,
    )


# -- the definitions, dense: rho f64[27, 3] -> f64[27, 3] --------------------------------------------------------------


def product(rho: Floats) -> Floats:
    return np.broadcast_to(rho.prod(1, keepdims=True), rho.shape)


def geometric(rho: Floats) -> Floats:
    return product(rho) ** (1 / rho.shape[1])


def within(values: Floats, low: float, high: float) -> Floats:
    return ((low <= values) & (values <= high)).astype(float)


def k3(rho: Floats) -> Floats:
    return rho - 1 - np.log(rho)


def over_mean(values: Floats) -> Floats:
    return np.broadcast_to(values.mean(1, keepdims=True), values.shape)


def left_behind(rho: Floats, advantages: Floats, delta: float) -> Floats:
    return 1.0 - ((over_mean(-np.log(rho)) > delta) & (advantages[:, None] < 0))


INF = math.inf

PLAIN: dict[str, tuple[Chain, Any]] = {
    "none": ((NoCorrection(),), lambda rho, _: np.ones_like(rho)),
    "token_is": ((TISToken(cap=INF),), lambda rho, _: rho),
    "token_tis_C2": ((TISToken(),), lambda rho, _: np.minimum(rho, 2)),
    "prefix_is": ((TISPrefix(cap=INF),), lambda rho, _: rho.cumprod(1)),
    "prefix_tis_C2": ((TISPrefix(),), lambda rho, _: np.minimum(rho.cumprod(1), 2)),
    "seq_is": ((TISSequence(cap=INF),), lambda rho, _: product(rho)),
    "seq_tis_C2": ((TISSequence(),), lambda rho, _: np.minimum(product(rho), 2)),
    "seq_tis_C5": ((TISSequence(cap=5.0),), lambda rho, _: np.minimum(product(rho), 5)),
    "clamp_08_12": ((Clamp(low=0.8, high=1.2),), lambda rho, _: rho.clip(0.8, 1.2)),
    "geo_weight": ((TISGeometric(high=INF),), lambda rho, _: geometric(rho)),
    "geo_weight_C12": ((TISGeometric(high=1.2),), lambda rho, _: np.minimum(geometric(rho), 1.2)),
    "icepop_05_5": ((IcePop(),), lambda rho, _: rho * within(rho, 0.5, 5)),
    "icepop_05_2": ((IcePop(high=2.0),), lambda rho, _: rho * within(rho, 0.5, 2)),
    "token_mis_C2": ((MISToken(high=2.0),), lambda rho, _: rho * within(rho, 0, 2)),
    "seq_mis_C3": ((MISSequence(),), lambda rho, _: product(rho) * within(product(rho), 0, 3)),
    "token_tis_geo_mask": (
        (TISToken(), GeoMask(low=0.8, high=1.25)),
        lambda rho, _: np.minimum(rho, 2) * within(geometric(rho), 0.8, 1.25),
    ),
    "token_tis_veto": (
        (TISToken(), Veto(threshold=0.5)),
        lambda rho, _: np.minimum(rho, 2) * (rho.min(1, keepdims=True) >= 0.5),
    ),
    "token_mask": (
        (TISToken(), TokenMask(low=0.8, high=1.25)),
        lambda rho, _: np.minimum(rho, 2) * within(rho, 0.8, 1.25),
    ),
    "sequence_mask": (
        (TISToken(), SequenceMask(low=0.5, high=2.0)),
        lambda rho, _: np.minimum(rho, 2) * within(product(rho), 0.5, 2),
    ),
    "outlier_mask": (
        (OutlierMask(low=0.5, high=2.0),),
        lambda rho, _: np.ones_like(rho) * ((rho.min(1) >= 0.5) & (rho.max(1) <= 2))[:, None],
    ),
    "token_tis_opsm": (
        (TISToken(), OPSM(delta=0.05)),
        lambda rho, advantages: np.minimum(rho, 2) * left_behind(rho, advantages, 0.05),
    ),
    "k_stat_token_k1": (
        (KStat(statistic="k1", over="token", low=-0.5, high=0.5),),
        lambda rho, _: within(-np.log(rho), -0.5, 0.5),
    ),
    "k_stat_sum_k2": (
        (KStat(statistic="k2", over="sum", high=0.2),),
        lambda rho, _: np.ones_like(rho) * within((np.log(rho) ** 2 / 2).sum(1, keepdims=True), 0, 0.2),
    ),
    "k_stat_mean_k3": (
        (KStat(high=0.05),),
        lambda rho, _: within(over_mean(k3(rho)), -INF, 0.05),
    ),
    "k_stat_max_k3": (
        (KStat(over="max", high=0.1),),
        lambda rho, _: np.ones_like(rho) * within(k3(rho).max(1, keepdims=True), -INF, 0.1),
    ),
}

KNOWN: dict[str, tuple[float, float, float]] = {
    "none": (0.6370423, 0.8263993, 0.3220975),
    "token_is": (0.5323282, 0.8993005, 0.5644112),
    "token_tis_C2": (0.5326945, 0.8980767, 0.4278400),
    "prefix_is": (0.4143308, 0.9352058, 0.5853477),
    "prefix_tis_C2": (0.4225345, 0.9288771, 0.4408307),
    "seq_is": (0.0000000, 1.0000000, 0.8169867),
    "seq_tis_C2": (0.1618797, 0.9886970, 0.5486869),
    "seq_tis_C5": (0.0419002, 0.9991241, 0.6603047),
    "clamp_08_12": (0.5761641, 0.8590953, 0.3447553),
    "geo_weight": (0.4177427, 0.9123759, 0.3584622),
    "geo_weight_C12": (0.4386273, 0.9017885, 0.3321264),
    "icepop_05_5": (0.5375321, 0.8976682, 0.4320216),
    "icepop_05_2": (0.5794507, 0.8671192, 0.3967695),
    "token_mis_C2": (0.5769152, 0.8688307, 0.3969839),
    "seq_mis_C3": (0.0888599, 0.9960490, 0.6219658),
    "token_tis_geo_mask": (0.7602646, 0.7296985, 0.2834978),
    "token_tis_veto": (0.5492749, 0.8985369, 0.4243699),
    "token_mask": (0.7910974, 0.6322669, 0.1763120),
    "sequence_mask": (0.7442143, 0.7424527, 0.3209201),
    "outlier_mask": (0.7457576, 0.7741537, 0.2933564),
    "token_tis_opsm": (0.3971795, 0.9190858, 0.3939232),
    "k_stat_token_k1": (0.6831147, 0.7540592, 0.2464656),
    "k_stat_sum_k2": (0.8486699, 0.7348709, 0.2586420),
    "k_stat_mean_k3": (0.8750043, 0.5044409, 0.0857272),
    "k_stat_max_k3": (0.9002799, 0.4799261, 0.0806024),
}
"""Relative bias, cosine to the exact gradient, trace of the variance."""


@pytest.mark.parametrize("name", PLAIN)
def test_bias_and_variance_of_every_correction_are_known_to_six_digits(name: str, enumerated: Problem) -> None:
    steps, plain = PLAIN[name]
    found = enumerated.judge(weights(steps, given(enumerated)))
    rho = np.exp(enumerated.logprobs - enumerated.behavior_logprobs)
    defined = enumerated.judge(plain(rho, enumerated.rewards - enumerated.baseline))
    for field in Bias.__slots__:
        assert getattr(found, field) == pytest.approx(getattr(defined, field), abs=1e-9)
    np.testing.assert_allclose([found.rel_bias, found.cosine, found.variance_trace], KNOWN[name], atol=1e-6)


@pytest.mark.parametrize("name", sorted(PLAIN.keys() & VECTOR["expected"]["estimators"].keys()))
def test_the_known_numbers_are_the_reference_vector_s(name: str) -> None:
    reference = VECTOR["expected"]["estimators"][name]
    expected = [reference[field] for field in ("rel_bias", "cosine", "variance_trace")]
    np.testing.assert_allclose(KNOWN[name], expected, atol=1e-6)


def test_every_row_of_the_table_is_judged() -> None:
    judged = {step.name for steps, _ in PLAIN.values() for step in steps}
    assert judged | {"self_norm", "binary_kl"} == set(CORRECTIONS), "binary_kl is of probabilities, not of ratios"


def test_the_untruncated_sequence_ratio_alone_has_no_bias() -> None:
    assert [name for name, (bias, _, _) in KNOWN.items() if bias < 1e-6] == ["seq_is"]


def test_self_normalisation_changes_the_size_of_the_expected_gradient_and_not_its_direction(
    enumerated: Problem,
) -> None:
    truncated = enumerated.judge(weights(chain("tis_sequence"), given(enumerated)))
    rho = np.exp(enumerated.logprobs - enumerated.behavior_logprobs)
    mean = float(enumerated.behavior_probabilities @ np.minimum(rho.prod(1), 2))
    normalised = enumerated.judge(weights(chain("tis_sequence + self_norm"), given(enumerated, mean_weight=mean)))
    assert mean < 1  # truncation lowers the mean of a ratio, which is 1
    assert normalised.cosine == pytest.approx(truncated.cosine, abs=1e-9)
    assert normalised.norm == pytest.approx(truncated.norm / mean, abs=1e-9)
    assert normalised.variance_trace == pytest.approx(truncated.variance_trace / mean**2, abs=1e-9)


def test_a_ratio_upside_down_is_further_off_than_no_correction(enumerated: Problem) -> None:
    upside_down = enumerated.judge(TISToken().formula(-enumerated.flat_log_ratio))
    assert upside_down.rel_bias > KNOWN["none"][0]


def test_the_exact_gradient_is_the_derivative_of_the_expected_reward(enumerated: Problem) -> None:
    # Compare autograd of the same softmax over contexts with the scores computed by hand.
    contexts = {context: index for index, context in enumerate(VECTOR["inputs"]["contexts"])}
    logits = torch.tensor([VECTOR["inputs"]["logits_theta"][context] for context in contexts], dtype=torch.float64)
    logits.requires_grad_()
    logprobs = torch.log_softmax(logits, dim=1)
    expected_reward = torch.zeros((), dtype=torch.float64)
    for tokens, reward in zip(enumerated.sequences.tolist(), enumerated.rewards, strict=True):
        rows = [contexts[",".join(map(str, tokens[:t]))] for t in range(len(tokens))]
        expected_reward = expected_reward + float(reward) * logprobs[rows, tokens].sum().exp()
    (gradient,) = torch.autograd.grad(expected_reward, logits)
    np.testing.assert_allclose(gradient.numpy().ravel(), enumerated.exact_gradient, atol=1e-12)
