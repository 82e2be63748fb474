"""A step that needs models besides the policy: which models are asked, in which order, and how their results are
used."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.training_step import train_batch
from asyncrl.backends.port import StepResult
from asyncrl.messages import replace
from asyncrl.policies.advantages import returns
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import MicroBatch, pack_for_ranks
from asyncrl.policies.losses.kl import Penalty
from tests.harness.scripted_backend import ScriptedBackend, answer, built, by_tokens

ANSWERS = (
    answer([10, 11, 12], reward=1.0),
    answer([20, 21], reward=0.5, finish_reason="length"),
    answer([30, 3, 31], reward=0.0, observed=[1]),
)
"""Token ids identify the answer; an environment wrote token 3."""


def tenths(micro_batch: MicroBatch) -> Any:
    """Return a tenth of the token id as its value: 2.1 after token 21."""
    return (micro_batch.tokens / 10).astype(np.float32)


def step(
    algorithm: Algorithm,
    backend: ScriptedBackend,
    *,
    ranks: int = 1,
    max_tokens: int = 100,
    **settings: Any,
) -> dict[str, float]:
    batch = built(ANSWERS, algorithm)
    shares = pack_for_ranks(batch.sequences, ranks=ranks, max_tokens=max_tokens)
    options = {"learning_rate": 0.1} | settings
    return dict(train_batch(backend, batch, [shares], algorithm=algorithm, step=0, **options).metrics)


def test_an_algorithm_that_needs_no_other_model_is_the_backends_step_and_nothing_else() -> None:
    backend, algorithm = ScriptedBackend(), resolve(ALGORITHMS["grpo"])
    batch = built(ANSWERS, algorithm)
    shares = pack_for_ranks(batch.sequences, ranks=1, max_tokens=100)
    result = train_batch(backend, batch, [shares], algorithm=algorithm, step=0, learning_rate=0.1)
    assert backend.asked == ["step policy"]
    assert backend.trained["policy"][0] is shares
    assert {name for name in result.metrics if not name.startswith("advantage/")} == {"loss"}


@pytest.mark.parametrize(("ranks", "max_tokens"), [(1, 100), (2, 3)])
def test_metrics_say_mean_and_deviation_of_the_advantages_that_are_trained(ranks: int, max_tokens: int) -> None:
    # Advantages 1, 0.5 and 0 on 3, 2 and 2 trained tokens: mean 4 / 7, mean square 3.5 / 7.
    metrics = step(resolve(ALGORITHMS["topr"]), ScriptedBackend(), ranks=ranks, max_tokens=max_tokens)
    assert metrics["advantage/mean"] == pytest.approx(4 / 7)
    assert metrics["advantage/std"] == pytest.approx((3.5 / 7 - (4 / 7) ** 2) ** 0.5)
    whitened = resolve(ALGORITHMS["grpo"], advantage="reinforce", whitening="biased")
    metrics = step(whitened, ScriptedBackend(), ranks=ranks, max_tokens=max_tokens)
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("ranks", "max_tokens"), [(1, 100), (1, 5), (2, 5)])
def test_gae_of_the_step_is_the_pure_function_of_the_whole_batch(ranks: int, max_tokens: int) -> None:
    """gamma = lam = 1: the return is the reward, plus the value after the cut for a cut answer."""
    backend = ScriptedBackend(outputs={"critic": tenths})
    algorithm = resolve(ALGORITHMS["ppo"], options={"truncated": "bootstrap"})
    step(algorithm, backend, ranks=ranks, max_tokens=max_tokens, critic_learning_rate=0.3)
    assert backend.asked == ["forward critic", "step policy", "step critic"]
    (shares,) = backend.trained["policy"]
    # Values of the states in which the tokens were chosen: 0.2 after the prompt's 2, 1.0 after 10, 0.3 after 3.
    values = {10: 0.2, 11: 1.0, 12: 1.1, 20: 0.2, 21: 2.0, 30: 0.2, 31: 0.3}
    # 2.6: 0.5 plus the 2.1 after the last token
    targets = {10: 1.0, 11: 1.0, 12: 1.0, 20: 2.6, 21: 2.6, 30: 0.0, 31: 0.0}
    assert by_tokens(shares, lambda m: m.model_outputs["old_values"]) == pytest.approx(values)
    assert by_tokens(shares, lambda m: m.model_outputs["returns"]) == pytest.approx(targets)
    expected = returns.whiten(np.array([targets[token] - values[token] for token in values]))
    assert by_tokens(shares, lambda m: m.advantages) == pytest.approx(
        dict(zip(values, expected, strict=True)), abs=1e-5
    )
    assert backend.trained["critic"] == [shares]
    assert backend.learning_rates == {"policy": [0.1], "critic": [0.3]}


def test_what_a_served_teacher_said_takes_the_place_of_its_forward_pass() -> None:
    served = [
        replace(one, teacher_logprobs=(-one.tokens / 100).astype(np.float32))
        for one in ANSWERS  # -0.1 of token 10
    ]
    backend, algorithm = ScriptedBackend(), resolve(ALGORITHMS["opd"])
    batch = built(served, algorithm)
    shares = pack_for_ranks(batch.sequences, ranks=2, max_tokens=5)
    train_batch(backend, batch, [shares], algorithm=algorithm, step=0, learning_rate=0.1)
    assert backend.asked == ["step policy"]
    found = by_tokens(backend.trained["policy"][0], lambda m: m.model_outputs["teacher_logprobs"])
    assert found == pytest.approx({token: -token / 100 for token in (10, 11, 12, 20, 21, 30, 31)})


def test_an_answer_that_is_masked_trains_neither_policy_nor_critic() -> None:
    backend = ScriptedBackend(outputs={"critic": tenths})
    step(dataclasses.replace(resolve(ALGORITHMS["ppo"]), masks_truncated=True), backend)
    (shares,) = backend.trained["policy"]
    assert set(by_tokens(shares, lambda m: m.advantages)) == {10, 11, 12, 30, 31}
    for micro_batch in shares[0]:
        assert not micro_batch.advantages[~micro_batch.response_mask].any()
        assert not micro_batch.loss_weights[~micro_batch.response_mask].any()


def test_the_critic_learns_alone_while_it_warms_up() -> None:
    backend = ScriptedBackend(outputs={"critic": tenths})
    row = step(resolve(ALGORITHMS["ppo"]), backend, learning_rate=None)
    assert backend.asked == ["forward critic", "step critic"]
    assert row["learner/learning_rate"] == 0.0


def test_a_batch_that_the_policy_skipped_does_not_train_the_critic() -> None:
    """The batch may be trained once more, without the groups that are not finite."""

    class Overflowing(ScriptedBackend):
        def step(self, shares: Any, *, learning_rate: float, model: str = "policy") -> StepResult:
            super().step(shares, learning_rate=learning_rate, model=model)
            return StepResult(metrics={"learner/skipped_steps": 1.0})

    backend = Overflowing(outputs={"critic": tenths})
    row = step(resolve(ALGORITHMS["ppo"]), backend)
    assert backend.asked == ["forward critic", "step policy"]
    assert row["learner/skipped_steps"] == 1.0


def test_a_reference_and_a_teacher_reach_the_loss() -> None:
    backend = ScriptedBackend(outputs={"reference": lambda m: -tenths(m), "teacher": lambda m: -2 * tenths(m)})
    step(resolve(ALGORITHMS["opd"], kl=Penalty(coef=0.1, estimate="k2", place="loss")), backend, max_tokens=5)
    assert backend.asked == ["forward reference", "forward teacher", "step policy"]
    (shares,) = backend.trained["policy"]
    assert by_tokens(shares, lambda m: m.model_outputs["ref_logprobs"])[21] == pytest.approx(-2.1)
    assert by_tokens(shares, lambda m: m.model_outputs["teacher_logprobs"])[21] == pytest.approx(-4.2)
    assert set(by_tokens(shares, lambda m: m.advantages).values()) == {0.0}


def test_kl_in_the_reward_is_taken_off_every_token_that_the_policy_sampled() -> None:
    """k1 = log policy - log reference is 0.5 everywhere, so with coefficient 0.2 each token costs 0.1."""
    backend = ScriptedBackend(outputs={"reference": lambda m: -tenths(m), "policy": lambda m: 0.5 - tenths(m)})
    kl = Penalty(coef=0.2, estimate="k1", place="reward")
    step(resolve(ALGORITHMS["topr"], loss="reinforce", correction="tis_token", kl=kl), backend)
    assert backend.asked == ["forward policy", "forward reference", "step policy"]
    costs = by_tokens(backend.trained["policy"][0], lambda m: m.advantages)
    # returns-to-go: 1 - 0.1 at the last token of the first answer, 1 - 0.3 at the first
    expected = {10: 0.7, 11: 0.8, 12: 0.9, 20: 0.3, 21: 0.4, 30: -0.2, 31: -0.1}
    assert costs == pytest.approx(expected, abs=1e-6)


def test_p3o_gets_the_effective_fraction_of_the_whole_batch() -> None:
    """Ratios 2 on the first answer's three tokens and 1 on the other four: (6 + 4)^2 / (7 x (12 + 4))."""

    def policy(micro_batch: MicroBatch) -> Any:
        return np.where(micro_batch.tokens // 10 == 1, math.log(2) - 1, -1).astype(np.float32)

    backend = ScriptedBackend(outputs={"policy": policy})
    step(resolve(ALGORITHMS["p3o"]), backend, max_tokens=5)
    fractions = by_tokens(backend.trained["policy"][0], lambda m: m.model_outputs["effective_fraction"])
    assert fractions == pytest.approx(dict.fromkeys(fractions, 100 / 112))


def test_m2po_drops_tokens_of_the_whole_batch_not_of_each_micro_batch() -> None:
    """Log ratios 0.3 on the first answer's three tokens, 0 on the other four."""

    def policy(micro_batch: MicroBatch) -> Any:
        return np.where(micro_batch.tokens // 10 == 1, 0.3 - 1, -1).astype(np.float32)

    backend = ScriptedBackend(outputs={"policy": policy})
    step(resolve(ALGORITHMS["m2po"]), backend, max_tokens=5)
    keep = by_tokens(backend.trained["policy"][0], lambda m: m.model_outputs["keep"])
    # 3 x 0.09 / 7 < 0.04; within the first answer alone, all but one token would be dropped
    assert sum(keep.values()) == 4 + 3
    sharper = ScriptedBackend(outputs={"policy": policy})
    step(resolve(ALGORITHMS["m2po"], options={"threshold": 0.02}), sharper, max_tokens=5)
    keep = by_tokens(sharper.trained["policy"][0], lambda m: m.model_outputs["keep"])
    assert sum(keep.values()) == 4 + 1  # 2 x 0.09 / 6 is above the limit, 0.09 / 5 is below
