"""Algorithms and options that are wrong are refused with the reason, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import app
from asyncrl.errors import ConfigError
from tests.algorithm_fixtures import run

REFUSED: dict[str, tuple[list[str], str]] = {
    "ratio twice": (
        ["algorithm.loss=coupled_ppo"],
        r"loss coupled_ppo weights by pi / behavior itself; correction tis_token would count that ratio twice",
    ),
    "ratio twice, by row": (["algorithm.name=cispo", "algorithm.correction=icepop"], "count that ratio twice"),
    "nothing corrects": (
        ["algorithm.correction=none"],
        r'correction = "none" trains data up to 4 versions old as if it were fresh, which collapses',
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
        "grpo has no option 'cup'; it has cap, clip_high, clip_low, dual_clip, eps",
    ),
    "option of another part": (['algorithm.options={"loss.cap"=2}'], "grpo has no option 'loss.cap'"),
    "option of two parts": (
        ["algorithm.name=m2po", "algorithm.correction=tis_token + veto", "algorithm.options={threshold=0.1}"],
        "'threshold' belongs to several parts; write loss.threshold or veto.threshold",
    ),
    "option of two corrections": (
        ["algorithm.correction=clamp + geo_mask", "algorithm.options={low=0.1}"],
        "'low' belongs to several parts; write clamp.low or geo_mask.low",
    ),
    "no number": (["algorithm.options={cap=nan}"], "cap must be a number, got nan"),
    "no such mode": (["algorithm.name=cispo", 'algorithm.options={cap_mode="abs"}'], "one_plus or absolute, got 'abs'"),
    "no such statistic": (
        ["algorithm.correction=tis_token + k_stat", 'algorithm.options={statistic="k4"}'],
        "statistic must be one of k1, k2, k3, got 'k4'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_combinations_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    overrides, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        app.algorithm(run(tmp_path, *overrides))


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
    ],
    ids=lambda overrides: " ".join(overrides).replace("algorithm.", ""),
)
def test_what_needs_no_weight_is_let_through(overrides: list[str], tmp_path: Path) -> None:
    app.algorithm(run(tmp_path, *overrides))
