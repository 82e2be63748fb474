"""Combinations of parts that are rejected, each with the reason (table: docs/guides/algorithms.md)."""

from __future__ import annotations

from asyncrl.errors import ConfigError
from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.corrections import chains
from asyncrl.policies.losses.kl import CORRECTED, Penalty


def refuse_wrong_combinations(made: Algorithm) -> None:
    """Raise ConfigError for parts that would train something other than their names say."""
    ratios = chains.ratios(made.correction)
    if made.loss.is_around_behavior and ratios:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} weights by pi / behavior itself; correction {ratios[0]} would count "
            'that ratio twice. Use correction = "none", or a loss around the learner such as ppo_clip'
        )
    _refuse_what_teaches_nothing(made)
    if made.kl is not None:
        _refuse_wrong_penalty(made, made.kl)
    if made.denominator == "after":
        _refuse_wrong_denominator(made)
    _refuse_masks_that_see_nothing(made)


def _refuse_wrong_denominator(made: Algorithm) -> None:
    """Reject denominator "after" where it changes nothing, or where its divisor is not known in time."""
    name = made.aggregation.name
    if made.aggregation.divides_by == "prompt":
        raise ConfigError(
            f'algorithm: denominator = "after" with {name} needs what is kept of a prompt before the gradient of any '
            "of its answers, and they lie in several micro-batches and ranks: it would take a second pass over the "
            "batch; use token_mean or seq_mean_token_mean"
        )
    if not made.aggregation.divides_by:
        raise ConfigError(
            f'algorithm: denominator = "after" divides by the tokens that are kept, and {name} does not divide by '
            "tokens; use token_mean or seq_mean_token_mean"
        )
    if chains.norm_level(made.correction) is not None:
        raise ConfigError(
            "algorithm: self_norm divides by the mean weight, in which rejected tokens already count as 0; "
            'denominator = "after" on top would count rejection twice: use "before"'
        )


def _refuse_masks_that_see_nothing(made: Algorithm) -> None:
    blind = [step.name for step in made.correction if "advantages" in step.inputs]
    if blind and "advantages" not in made.loss.inputs:
        raise ConfigError(
            f"algorithm: correction {blind[0]} rejects by the sign of the advantage, and loss {made.loss.name} does "
            "not look at advantages; use geo_mask or veto, or a loss such as ppo_clip"
        )


def _refuse_what_teaches_nothing(made: Algorithm) -> None:
    """Reject parts whose result is never used."""
    has_rewards = "advantages" in made.loss.inputs
    if made.advantage_scores and not has_rewards:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} does not look at advantages, which need a pass of another model here; "
            'use a loss such as ppo_clip, or advantage = "none" and no KL in the reward'
        )
    if made.advantage.name == "none" and has_rewards and "teacher" not in made.models:
        raise ConfigError(
            f'algorithm: advantage = "none" leaves loss {made.loss.name} nothing to learn from; it goes with a teacher '
            "(loss opd_reward or opd) or with sft"
        )


def _refuse_wrong_penalty(made: Algorithm, kl: Penalty) -> None:
    if kl.place == "reward" and "token_rewards" not in made.advantage.inputs:
        able = ", ".join(name for name, kind in ADVANTAGES.items() if "token_rewards" in kind.inputs)
        raise ConfigError(
            f'reference: kl_in = "reward" gives every token a reward of its own, and advantage {made.advantage.name} '
            f'takes one per answer; use kl_in = "loss", or one of the advantages {able}'
        )
    if kl.place == "loss" and kl.estimate == "k1":
        raise ConfigError(
            'reference: kl = "k1" in the loss pulls nowhere, its gradient is 0 in expectation; use "unbiased" or "k2", '
            'or kl_in = "reward"'
        )
    if kl.place == "reward" and kl.estimate in CORRECTED:
        raise ConfigError(
            f'reference: kl = "{kl.estimate}" is for the gradient of a loss; with kl_in = "reward" use "k1", which is '
            "exact"
        )
