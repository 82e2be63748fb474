"""Invalid algorithms and options are refused with the reason before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from asyncrl.adapters import registry
from asyncrl.errors import ConfigError
from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.component import Component, allowed_range, load_class
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.losses.aggregation import AGGREGATIONS
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.table import LOSSES
from tests.harness.algorithms import run

COMPONENTS: list[type[Component]] = [
    *ADVANTAGES.values(),
    *(load_class(name, LOSSES) for name in LOSSES),
    *AGGREGATIONS.values(),
    *(load_class(name, CORRECTIONS) for name in CORRECTIONS),
]

UNCORRECTED = ("none", "self_norm", "veto", "outlier_mask")
"""Corrections that leave stale data uncorrected if used alone."""

REFUSED: dict[str, tuple[list[str], str]] = {
    "ratio twice": (
        ["algorithm.loss=coupled_ppo"],
        r"loss coupled_ppo weights by pi / behavior itself; correction tis_token would count that ratio twice",
    ),
    "ratio twice, by row": (["algorithm.name=cispo", "algorithm.correction=icepop"], "count that ratio twice"),
    "nothing corrects": (
        ["algorithm.correction=none"],
        r'correction = "none" trains data up to 8 versions old as if it were fresh, which collapses',
    ),
    "a mask of next to nothing": (
        ["algorithm.correction=veto"],
        r'correction = "veto" trains data up to 8 versions old as if it were fresh.* counts 1, and may count 0.5; use',
    ),
    "outliers alone": (["algorithm.correction=outlier_mask"], "as if it were fresh"),
    "a bound that binds nothing": (
        ["algorithm.correction=k_stat", "algorithm.options={high=1e9}"],
        '"k_stat" trains data up to 8 versions old as if it were fresh',
    ),
    "a mask of large ratios alone": (
        ["algorithm.correction=geo_mask", "algorithm.options={low=0, high=1.1}"],
        "as if it were fresh",
    ),
    "a weight that hardly moves": (
        ["algorithm.correction=clamp", "algorithm.options={low=0.99, high=1.01}"],
        "counts 0.99, and may count 0.5",
    ),
    "a norm is no correction": (["algorithm.correction=none + self_norm"], "as if it were fresh"),
    "after a mean per prompt": (
        ["algorithm.aggregation=prompt_mean", "algorithm.denominator=after"],
        "they lie in several micro-batches and ranks: it would take a second pass over the batch",
    ),
    "after what divides by no tokens": (
        ["algorithm.name=dr_grpo", "algorithm.denominator=after"],
        "seq_mean_token_sum_norm does not divide by tokens",
    ),
    "after and self_norm": (
        ["algorithm.correction=tis_token + geo_mask + self_norm", "algorithm.denominator=after"],
        "would count rejection twice",
    ),
    "ratio twice, by anchor": (
        ["algorithm.name=gspo", 'algorithm.options={anchor="behavior"}'],
        r"loss gspo weights by pi / behavior itself; correction tis_token would count that ratio twice",
    ),
    "a mask by advantages that nobody looks at": (
        ["algorithm.name=opd", "algorithm.loss=opd", "algorithm.correction=opsm", 'teacher.path="."'],
        "opsm rejects by the sign of the advantage, and loss opd does not look at advantages",
    ),
    "dual clip within the ratio": (["algorithm.options={dual_clip=0.5}"], "use more than 1, such as 3, or 0 for none"),
    "unknown row": (["algorithm.name=grop"], "algorithm.name: 'grop' is unknown; did you mean 'grpo'"),
    "unknown advantage": (["algorithm.advantage=x"], "advantage must be one of grpo, .*, got 'x'"),
    "unknown loss": (["algorithm.loss=x"], "loss must be one of reinforce, ppo_clip, .*, got 'x'"),
    "unknown aggregation": (["algorithm.aggregation=x"], "aggregation must be one of token_mean, .*, got 'x'"),
    "unknown correction": (["algorithm.correction=tis_token + x"], "correction must be one of none, .*, got 'x'"),
    "unknown option": (
        ["algorithm.options={cup=2}"],
        "grpo has no option 'cup'; did you mean 'cap'\\? It has baseline, cap, clip_high, clip_low, dual_clip, eps",
    ),
    "option of another component": (['algorithm.options={"loss.cap"=2}'], "grpo has no option 'loss.cap'"),
    "an empty prefix": (['algorithm.options={".clip_low"=0.1}'], "grpo has no option '.clip_low'"),
    "option of two components": (
        ["algorithm.name=m2po", "algorithm.correction=tis_token + veto", "algorithm.options={threshold=0.1}"],
        "'threshold' belongs to several components; write loss.threshold or veto.threshold",
    ),
    "option of two corrections": (
        ["algorithm.correction=clamp + geo_mask", "algorithm.options={low=0.1}"],
        "'low' belongs to several components; write clamp.low or geo_mask.low",
    ),
    "no number": (["algorithm.options={cap=nan}"], "cap must be a number, got nan"),
    "no such mode": (
        ["algorithm.name=cispo", 'algorithm.options={cap_mode="abs"}'],
        "cap_mode must be one of one_plus, absolute, got 'abs'",
    ),
    "no such statistic": (
        ["algorithm.correction=tis_token + k_stat", 'algorithm.options={statistic="k4"}'],
        "statistic must be one of k1, k2, k3, got 'k4'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_combinations_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    overrides, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        registry.algorithm(run(tmp_path, *overrides))


OUT_OF_RANGE: dict[str, tuple[list[str], str]] = {
    "cap=0": ([], r"cap of tis_token must be >= 1 \(the ratio of a fresh token is 1\), got 0"),
    "cap=-inf": ([], "cap of tis_token must be >= 1 .*, got -inf"),
    "low=2, high=0.5": (["algorithm.correction=geo_mask"], r"low of geo_mask must be >= 0 and <= 1 .*, got 2"),
    "low=0.5, high=0.4": (["algorithm.correction=clamp"], "high of clamp must be >= 1 .*, got 0.4"),
    "low=1, high=1": (["algorithm.correction=icepop"], "low of icepop must be < its high, got 1 and 1"),
    "low=0.2, high=0.1": (["algorithm.correction=tis_token + k_stat"], "low of k_stat must be < its high"),
    "threshold=2": (["algorithm.correction=tis_token + veto"], "threshold of veto must be > 0 and <= 1"),
    "threshold=0": (["algorithm.name=m2po"], "threshold of m2po must be > 0 and finite, got 0"),
    "tau_positive=0": (["algorithm.name=sapo"], "tau_positive of sapo must be > 0 and finite, got 0"),
    "f_norm=0": (["algorithm.name=gpg"], "f_norm of gpg must be > 0 and finite, got 0"),
    "ratio_cap=0": (["algorithm.loss=dppo", "algorithm.correction=none"], "ratio_cap of dppo must be >= 1"),
    "max_response_tokens=0": (["algorithm.name=dr_grpo"], "max_response_tokens of seq_mean_token_sum_norm must be > 0"),
    "gamma=1.01": (["algorithm.name=reinforce_pp"], "gamma of reinforce_pp must be >= 0 and <= 1, got 1.01"),
    "lam=2": (["algorithm.name=ppo"], "lam of gae must be >= 0 and <= 1, got 2"),
    "eps=0": ([], "eps of grpo must be > 0 and finite, got 0"),
}


@pytest.mark.parametrize("options", OUT_OF_RANGE)
def test_an_option_that_would_train_nothing_or_infinity_is_refused(options: str, tmp_path: Path) -> None:
    overrides, reason = OUT_OF_RANGE[options]
    with pytest.raises(ConfigError, match=f"algorithm.options: {reason}"):
        registry.algorithm(run(tmp_path, *overrides, f"algorithm.options={{{options}}}"))


def test_every_number_that_a_part_takes_has_a_range() -> None:
    for kind in COMPONENTS:
        kind().check()
        for option, value in kind().options.items():
            if isinstance(value, float):
                assert allowed_range(kind, option) is not None, f"{kind.name}.{option}"


@pytest.mark.parametrize(
    "override",
    [
        "reference.kl_coef=nan",
        "critic.learning_rate=nan",
        "algorithm.entropy_coef=inf",
        "learner.learning_rate=inf",
        "rollout.temperature=inf",
        "staleness.weight_rate=nan",
        "bus.ack_seconds=inf",
        "learner.betas=[0.9, nan]",
    ],
)
def test_a_number_of_the_run_file_is_finite(override: str, tmp_path: Path) -> None:
    key = override.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=f"{key} must be finite, got (nan|inf)"):
        run(tmp_path, override)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss=coupled_ppo", "algorithm.correction=none"],
        ["algorithm.loss=coupled_ppo", "algorithm.correction=geo_mask"],
        ["algorithm.name=sapo", 'algorithm.options={anchor="behavior"}', "algorithm.correction=none"],
        ["algorithm.loss=decoupled_ppo", "algorithm.options={dual_clip=3}"],
        ["algorithm.name=gspo", "algorithm.correction=icepop", "algorithm.denominator=after"],
        ["algorithm.name=sft"],
        ["algorithm.correction=none", "run.mode=sync", "staleness.max_staleness=0"],
        ["algorithm.correction=none", "algorithm.allow_uncorrected=true"],
        ["algorithm.correction=geo_mask", "algorithm.denominator=after"],
        *([f"algorithm.correction={name}"] for name in CORRECTIONS if name not in UNCORRECTED),
        ["algorithm.correction=tis_token", "algorithm.options={cap=inf}"],
        ["algorithm.correction=veto", "algorithm.options={threshold=0.5}"],
        ["algorithm.correction=k_stat", 'algorithm.options={statistic="k1", low=-0.1, high=0.1}'],
    ],
    ids=lambda overrides: " ".join(overrides).replace("algorithm.", ""),
)
def test_what_needs_no_weight_is_let_through(overrides: list[str], tmp_path: Path) -> None:
    made = run(tmp_path, *overrides)
    assert registry.algorithm(made).name == made.algorithm.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Misspelt(Loss):
    def formula(self, logprobs: torch.Tensor, advantage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -advantage * logprobs, logprobs > 0


def test_a_formula_that_asks_for_what_is_no_input_is_refused(tmp_path: Path) -> None:
    made = run(tmp_path, f"algorithm.loss={__name__}:Misspelt")
    with pytest.raises(
        ConfigError, match=r"Misspelt takes 'advantage', which is no input; did you mean 'advantages'\?"
    ):
        registry.algorithm(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavioral(Loss):
    def formula(self, logprobs: torch.Tensor, behavior_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -(logprobs - behavior_logprobs).exp(), logprobs > 0


def test_a_formula_with_behavior_logprobs_is_refused_a_weight_by_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="correction tis_token would count that ratio twice"):
        registry.algorithm(run(tmp_path, f"algorithm.loss={__name__}:Behavioral"))
