"""Parts of an algorithm that do not go together, each refused with the reason (docs/algorithms.md has the table)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.policies.catalogue import ADVANTAGES

if TYPE_CHECKING:
    from asyncrl.policies.algorithms import Algorithm
    from asyncrl.policies.kl import Penalty


def refuse_wrong_combinations(made: Algorithm) -> None:
    ratios = [step.name for step in made.correction if step.kind == "weight" and step.name != "none"]
    if made.loss.is_coupled and ratios:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} weights by pi / behavior itself; correction {ratios[0]} would count "
            'that ratio twice. Use correction = "none", or a loss around the learner such as ppo_clip'
        )
    _refuse_what_teaches_nothing(made)
    if made.kl is not None:
        _refuse_wrong_penalty(made, made.kl)
    if made.denominator == "after" and made.aggregation.name != "token_mean":
        raise ConfigError(
            f'algorithm: denominator = "after" goes with aggregation token_mean; {made.aggregation.name} divides by '
            "trajectories or prompts, whose number rejection does not change"
        )


def _refuse_what_teaches_nothing(made: Algorithm) -> None:
    """Parts whose result nobody would look at."""
    has_rewards = "advantages" in made.loss.takes
    if made.advantage_scores and not has_rewards:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} does not look at advantages, and a pass of another model makes them; "
            'use a loss such as ppo_clip, or advantage = "none" and no KL in the reward'
        )
    if made.advantage.name == "none" and has_rewards and "teacher" not in made.models:
        raise ConfigError(
            f'algorithm: advantage = "none" leaves loss {made.loss.name} nothing to learn from; it goes with a teacher '
            "(loss opd_reward or opd) or with sft"
        )


def _refuse_wrong_penalty(made: Algorithm, kl: Penalty) -> None:
    if kl.place == "reward" and "token_rewards" not in made.advantage.needs:
        able = ", ".join(name for name, row in ADVANTAGES.items() if "token_rewards" in row.needs)
        raise ConfigError(
            f'reference: kl_in = "reward" gives every token a reward of its own, and advantage {made.advantage.name} '
            f'takes one per answer; use kl_in = "loss", or one of the advantages {able}'
        )
    if kl.place == "loss" and kl.estimate == "k1":
        raise ConfigError(
            'reference: kl = "k1" in the loss pulls nowhere, its gradient is 0 in expectation; use "unbiased" or "k2", '
            'or kl_in = "reward"'
        )
    if kl.place == "reward" and kl.estimate == "unbiased":
        raise ConfigError(
            'reference: kl = "unbiased" mends the gradient of a loss; with kl_in = "reward" use "k1", which is exact'
        )
