"""Policy losses: gradients derived by hand, and no nan for any input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.contrib.losses.aipo import AIPO
from asyncrl.contrib.losses.aspo import ASPO
from asyncrl.contrib.losses.gmpo import GMPO
from asyncrl.contrib.losses.m2po import M2PO
from asyncrl.contrib.losses.opmd import OPMD, SimpleOPMD
from asyncrl.contrib.losses.p3o import P3O
from asyncrl.contrib.losses.prime_rl import PrimeRL
from asyncrl.contrib.losses.sapo import SAPO
from asyncrl.contrib.losses.topr import TOPR, TOPRByReward
from asyncrl.contrib.losses.vespo import VESPO
from asyncrl.errors import ConfigError
from asyncrl.policies.losses.cispo import Cispo
from asyncrl.policies.losses.dppo import DPPO
from asyncrl.policies.losses.loss import Loss, LossInputs
from asyncrl.policies.losses.ppo import GSPO, CoupledPPO, DecoupledPPO, PPOClip
from asyncrl.policies.losses.reinforce import SFT, Reinforce
from asyncrl.policies.losses.table import LOSSES as TABLE

SEQUENCE = torch.tensor([0, 0, 0, 2, 2, 3])  # sequence 1 has no tokens
KEEP = torch.tensor([True, True, False, True, True, True])

LOSSES: dict[str, Loss] = {
    "reinforce": Reinforce(),
    "sft": SFT(),
    "cispo": Cispo(),
    "cispo_absolute": Cispo(cap_mode="absolute", clip_high=1.5),
    "aipo": AIPO(cap=2.0),
    "aipo_surrogate": AIPO(cap=2.0, form="surrogate"),
    "topr": TOPR(),
    "topr_token": TOPR(level="token"),
    "topr_by_reward": TOPRByReward(),
    "p3o": P3O(),
    "ppo_clip": PPOClip(),
    "ppo_dual_clip": PPOClip(clip_high=0.28, dual_clip=3.0),
    "coupled_ppo": CoupledPPO(),
    "decoupled_ppo": DecoupledPPO(),
    "gspo": GSPO(clip_low=0.2, clip_high=0.2),
    "gspo_behavior": GSPO(clip_low=0.2, clip_high=0.2, anchor="behavior"),
    "gspo_sequence": GSPO(clip_low=0.2, clip_high=0.2, advantage_per="sequence"),
    "gmpo": GMPO(),
    "aspo": ASPO(),
    "sapo": SAPO(),
    "dppo_tv": DPPO(),
    "dppo_kl": DPPO(divergence="kl", delta_low=0.05, delta_high=0.05),
    "prime_rl": PrimeRL(),
    "prime_rl_ipo": PrimeRL(mask="ipo"),
    "m2po": M2PO(),
    "opmd": OPMD(),
    "opmd_simple": SimpleOPMD(),
    "vespo": VESPO(),
}


def compute(name: str, new: Any, old: Any, advantages: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """Return the loss with ``old`` as the prox and the behavior policy, from the inputs that its formula needs."""
    known = {
        "logprobs": new,
        "prox_logprobs": old,
        "behavior_logprobs": old,
        "advantages": advantages,
        "rewards": advantages,
        "sequence": SEQUENCE,
        "num_sequences": 4,
        "keep": KEEP,
        "effective_fraction": 0.75,
    } | more
    made: tuple[Tensor, Tensor] = LOSSES[name].formula(**{key: known[key] for key in LOSSES[name].inputs})
    return made


def test_every_loss_of_the_table_is_here_but_those_of_a_teacher_and_of_distributions() -> None:
    assert {loss.name for loss in LOSSES.values()} | {"opd", "opd_reward", "distill", "score_centered"} == set(TABLE)


def sums(values: list[float]) -> list[float]:
    """Return the sum over each token's sequence, computed by a loop."""
    index = SEQUENCE.tolist()
    return [sum(v for v, other in zip(values, index, strict=True) if other == mine) for mine in index]


def means(values: list[float]) -> list[float]:
    return [total / count for total, count in zip(sums(values), sums([1.0] * len(values)), strict=True)]


def clip_slope(a: float, r: float, low: float = 0.2, high: float = 0.2) -> float:
    return 0.0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else -a * r


def sapo_slope(a: float, r: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -a * 4 * gate * (1 - gate) * r


def aspo_slope(a: float, r: float) -> float:
    if a > 0:
        return 0.0 if r > 1.2 else -a * min(1 / r, 3.0)
    return -a * min(r, 3.0) if r > 0.8 else 0.0


def dppo_slope(a: float, new: float, old: float, *, is_kl: bool) -> float:
    p, q = math.exp(new), math.exp(old)
    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if is_kl else abs(p - q)
    is_away = (a > 0 and p > q) or (a < 0 and p < q)
    return 0.0 if is_away and distance > (0.05 if is_kl else 0.2) else -a * min(p / q, 20.0)


def prime_slope(a: float, new: float, old: float, *, is_ipo: bool = False) -> float:
    moved, r = math.exp(new) - math.exp(old), math.exp(new - old)
    is_masked = abs(moved) > 0.2 and (is_ipo or (a > 0) == (moved > 0)) and (is_ipo or a != 0)
    return (0.0 if is_masked else -a * r) + 2e-3 * (new - old)


def vespo_slope(a: float, w: float) -> float:
    k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return -a * w**k * math.exp(rate * (1 - w))


def gmpo_slopes(advantages: list[float], logs: list[float]) -> list[float]:
    """d/dlogprob of -A exp(mean clipped log ratio), summed over the sequence's tokens."""
    is_clipped = [log > 0.4 if a >= 0 else log < -0.4 for a, log in zip(advantages, logs, strict=True)]
    bounded = [math.copysign(0.4, log) if out else log for log, out in zip(logs, is_clipped, strict=True)]
    return [
        0.0 if out else -total / count * math.exp(mean)
        for out, total, count, mean in zip(is_clipped, sums(advantages), sums([1.0] * 6), means(bounded), strict=True)
    ]


def slopes(name: str, new: list[float], old: list[float], advantages: list[float]) -> list[float]:
    """d loss / d logprob of each token, with the formulas differentiated by hand."""
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    logs = [n - o for n, o in zip(new, old, strict=True)]
    paired = list(zip(advantages, ratios, strict=True))
    table: dict[str, Callable[[], list[float]]] = {
        "reinforce": lambda: [-a for a in advantages],
        "sft": lambda: [-1.0] * len(new),
        "cispo": lambda: [-a * min(r, 5.0) for a, r in paired],
        "cispo_absolute": lambda: [-a * min(r, 1.5) for a, r in paired],
        "aipo": lambda: [-a * min(r, 2.0) for a, r in paired],
        "aipo_surrogate": lambda: [-a * r if r < 2.0 else 0.0 for a, r in paired],
        "topr": lambda: [
            -a if a > 0 else -a * min(math.exp(s), 1.0) for a, s in zip(advantages, sums(logs), strict=True)
        ],
        "topr_token": lambda: [-a if a > 0 else -a * min(r, 1.0) for a, r in paired],
        "p3o": lambda: [-a * min(r, 0.75) + 0.25 * (1 - 1 / r) for a, r in paired],
        "ppo_clip": lambda: [clip_slope(a, r) for a, r in paired],
        "ppo_dual_clip": lambda: [0.0 if a < 0 and r > 3 else clip_slope(a, r, high=0.28) for a, r in paired],
        "coupled_ppo": lambda: [clip_slope(a, r) for a, r in paired],
        "decoupled_ppo": lambda: [clip_slope(a, r) for a, r in paired],
        "gspo": lambda: [clip_slope(a, math.exp(m)) for a, m in zip(advantages, means(logs), strict=True)],
        "gspo_behavior": lambda: [clip_slope(a, math.exp(m)) for a, m in zip(advantages, means(logs), strict=True)],
        "gspo_sequence": lambda: [
            clip_slope(a, math.exp(m)) for a, m in zip(means(advantages), means(logs), strict=True)
        ],
        "gmpo": lambda: gmpo_slopes(advantages, logs),
        "topr_by_reward": lambda: table["topr"](),
        "prime_rl": lambda: [prime_slope(a, n, o) for a, n, o in zip(advantages, new, old, strict=True)],
        "prime_rl_ipo": lambda: [
            prime_slope(a, n, o, is_ipo=True) for a, n, o in zip(advantages, new, old, strict=True)
        ],
        "opmd": lambda: [-a + 0.1 * log for a, log in zip(advantages, logs, strict=True)],
        "opmd_simple": lambda: [-a / 2 for a in advantages],
        "vespo": lambda: [vespo_slope(a, math.exp(s)) for a, s in zip(advantages, sums(logs), strict=True)],
        "aspo": lambda: [aspo_slope(a, r) for a, r in paired],
        "sapo": lambda: [sapo_slope(a, r) for a, r in paired],
        "dppo_tv": lambda: [dppo_slope(a, n, o, is_kl=False) for a, n, o in zip(advantages, new, old, strict=True)],
        "dppo_kl": lambda: [dppo_slope(a, n, o, is_kl=True) for a, n, o in zip(advantages, new, old, strict=True)],
        "m2po": lambda: [-a * r if k else 0.0 for (a, r), k in zip(paired, KEEP.tolist(), strict=True)],
    }
    return table[name]()


# Avoid round numbers: on the edge of a clip, either gradient would be right.
logprob = st.floats(-4.0, -0.05).map(lambda x: x + 1e-5 * math.sin(1e6 * x))
six = st.lists(logprob, min_size=6, max_size=6)
six_advantages = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), min_size=6, max_size=6)


def tensor(values: Any, *, is_live: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=is_live)


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)
    return result


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(new=six, old=six, advantages=six_advantages)
def test_the_gradient_is_the_one_worked_by_hand(
    name: str, new: list[float], old: list[float], advantages: list[float]
) -> None:
    logprobs = tensor(new, is_live=True)
    loss, clipped = compute(name, logprobs, tensor(old), tensor(advantages))
    expected = slopes(name, new, old, advantages)
    np.testing.assert_allclose(gradient(loss, logprobs).numpy(), expected, rtol=1e-6, atol=1e-9)
    assert loss.shape == clipped.shape == (6,)
    assert clipped.dtype == torch.bool and not clipped.requires_grad


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "gspo", "aspo", "dppo_tv", "dppo_kl", "m2po"])
@settings(max_examples=10)
@given(new=six, old=six, advantages=six_advantages)
def test_clipped_tokens_have_no_gradient_and_others_have_one(
    name: str, new: list[float], old: list[float], advantages: list[float]
) -> None:
    logprobs = tensor(new, is_live=True)
    loss, clipped = compute(name, logprobs, tensor(old), tensor(advantages))
    is_zero = gradient(loss, logprobs) == 0
    has_advantage = tensor(advantages) != 0
    # ASPO's soft dual clip cuts a weight but keeps its gradient, so it does not count.
    assert bool((is_zero == clipped)[has_advantage].all())


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"m2po"}))  # its mask keeps its position
@settings(max_examples=10)
@given(new=six, old=six, advantages=six_advantages)
def test_the_order_of_tokens_in_a_sequence_does_not_matter(
    name: str, new: list[float], old: list[float], advantages: list[float]
) -> None:
    order = torch.tensor([2, 0, 1, 4, 3, 5])  # reorder within sequences 0 and 2
    loss, clipped = compute(name, tensor(new), tensor(old), tensor(advantages))
    moved, moved_clipped = compute(name, tensor(new)[order], tensor(old)[order], tensor(advantages)[order])
    torch.testing.assert_close(moved, loss[order])
    assert torch.equal(moved_clipped, clipped[order])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_logprob_however_extreme_makes_nan_or_an_infinite_gradient(name: str, dtype: torch.dtype) -> None:
    extremes = [-math.inf, -1e30, -1e4, -50.0, -1e-8, 0.0]
    for shift in range(6):
        for advantage in (-1.0, 0.0, 1.0):
            logprobs = torch.tensor(extremes, dtype=dtype, requires_grad=True)
            anchor = torch.tensor(extremes[shift:] + extremes[:shift], dtype=dtype)
            loss, _ = compute(name, logprobs, anchor, torch.full((6,), advantage, dtype=dtype))
            assert bool(loss.isfinite().all()), (name, loss)
            assert bool(gradient(loss, logprobs).isfinite().all()), name


@pytest.mark.parametrize("name", LOSSES)
def test_numpy_and_torch_give_the_same(name: str) -> None:
    generator = np.random.default_rng(0)
    new, old = -generator.exponential(1.0, (2, 6))
    advantages = generator.normal(size=6)
    for given_numpy, given_torch in zip(
        compute(name, new, old, advantages), compute(name, *map(torch.tensor, (new, old, advantages))), strict=True
    ):
        assert torch.equal(given_numpy, given_torch)


@pytest.mark.parametrize(
    "name", sorted(name for name, loss in LOSSES.items() if not {"sequence", "keep"} & set(loss.inputs))
)
def test_no_tokens_give_no_losses(name: str) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    loss, clipped = compute(name, nothing, torch.zeros(0), torch.zeros(0))
    assert loss.shape == clipped.shape == (0,)
    loss.sum().backward()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_flow_through_the_trained_logprobs_only(name: str) -> None:
    logprobs, anchor, advantages = (torch.full((6,), -1.0, requires_grad=True) for _ in range(3))
    compute(name, logprobs, anchor, advantages)[0].sum().backward()
    assert logprobs.grad is not None
    assert anchor.grad is None and advantages.grad is None


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"sft", "m2po", "opmd_simple", "gmpo", "gspo_sequence"}))
@settings(max_examples=10)
@given(new=six, advantages=six_advantages)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(
    name: str, new: list[float], advantages: list[float]
) -> None:
    logprobs = tensor(new, is_live=True)
    loss, _ = compute(name, logprobs, tensor(new), tensor(advantages), effective_fraction=1.0)
    torch.testing.assert_close(gradient(loss, logprobs), -tensor(advantages))


@settings(max_examples=10)
@given(new=six, old=six, threshold=st.floats(1e-6, 4.0))
def test_m2po_keeps_the_most_tokens_whose_second_moment_is_below_the_threshold(
    new: list[float], old: list[float], threshold: float
) -> None:
    squares = np.square(np.array(new) - np.array(old))
    kept = M2PO(threshold=threshold).kept(tensor(new), tensor(old)).numpy()
    count = kept.sum()
    assert count >= 1
    assert count == 1 or squares[kept].mean() < threshold
    assert squares[kept].max() <= squares[~kept].min(initial=math.inf)
    if count < 6:
        assert np.sort(squares)[: count + 1].mean() >= threshold * (1 - 1e-9)


def test_a_sequence_s_advantages_are_averaged_where_told() -> None:
    """AReaL's GSPO: an answer whose tokens have different advantages trains on their mean."""
    new = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = tensor([3.0, 0.0, 0.0, 1.0, -1.0, 2.0])
    loss, _ = compute("gspo_sequence", new, new.detach(), advantages)
    np.testing.assert_allclose(gradient(loss, new).numpy(), [-1.0, -1.0, -1.0, 0.0, 0.0, -2.0])


def test_topr_by_reward_tapers_what_the_reward_calls_bad() -> None:
    new, old = tensor([-1.0] * 6), tensor([-2.0] * 6)  # ratios above 1: tapered to 1 if bad
    good, _ = compute("topr_by_reward", new - 2, old, -torch.ones(6), rewards=torch.ones(6))
    bad, clipped = compute("topr_by_reward", new, old, torch.ones(6), rewards=-torch.ones(6))
    np.testing.assert_allclose(good.numpy(), [-3.0] * 6)
    np.testing.assert_allclose(bad.numpy(), [1.0] * 6)
    assert clipped.all()


def test_ppo_clip_stops_the_gradient_only_where_it_would_go_further() -> None:
    logprobs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = PPOClip().formula(logprobs, torch.zeros(4), advantage)
    # -1.2 (clipped at 1 + 0.2), 1.5, -0.5, 0.8 (clipped at 1 - 0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    assert clipped.tolist() == [True, False, False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5, -0.5, 0.0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Loss):
    def formula(self, logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return -(advantages * logprobs).mean(), logprobs > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone(Loss):
    def formula(self, logprobs: Tensor) -> Tensor:
        return -logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached(Loss):
    def formula(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return -logprobs.detach(), logprobs > 0


def test_a_loss_without_a_gradient_is_refused_where_its_logprobs_have_one() -> None:
    """Beside a KL term or an entropy bonus it would train these alone, without a word."""
    given = LossInputs(
        **dict.fromkeys(("entropy", "behavior_logprobs", "advantages"), torch.zeros(6)),
        logprobs=torch.zeros(6),
        loss_weights=torch.ones(6),
        is_fresh=torch.ones(6, dtype=torch.bool),
        staleness=torch.zeros(6),
        sequence=SEQUENCE,
        num_sequences=4,
    )
    Detached()(given)
    with pytest.raises(ConfigError, match=r"formula returned a loss without a gradient; let it depend on logprobs"):
        Detached()(replace(given, logprobs=torch.zeros(6, requires_grad=True)))


@pytest.mark.parametrize(("own", "returned"), [(Mean(), r"\[\[\], \[6\]\]"), (Alone(), "Tensor")])
def test_a_formula_that_returns_no_number_per_token_is_refused(own: Loss, returned: str) -> None:
    with pytest.raises(ConfigError, match=rf"must return two tensors.* of shape \[6\], and returned {returned}$"):
        own(
            LossInputs(
                **dict.fromkeys(("logprobs", "entropy", "behavior_logprobs", "advantages"), torch.zeros(6)),
                loss_weights=torch.ones(6),
                is_fresh=torch.ones(6, dtype=torch.bool),
                staleness=torch.zeros(6),
                sequence=SEQUENCE,
                num_sequences=4,
            )
        )
