"""A run has the alarms that mean something for it."""

from __future__ import annotations

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.launch.assembly.build_learner import choose_alarms
from tests import ROOT

TEACHER = ["algorithm.name=distill", "teacher.server=big", "teacher.top_logprobs=4", "servers.big.path=model"]


@pytest.mark.parametrize(
    ("overrides", "is_asked"),
    [([], True), (["algorithm.name=sft"], False), (TEACHER, False)],  # a loss for which the age of tokens is no matter
)
def test_drift_is_asked_of_runs_whose_loss_reads_what_sampled_the_tokens(overrides: list[str], is_asked: bool) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", overrides)
    names = {alarm.name for alarm in choose_alarms(run, registry.algorithm(run))}
    assert ("drift" in names) == is_asked
    assert "reward_fell" in names
