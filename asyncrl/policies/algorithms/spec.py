"""A row of the table of algorithms, and ``resolve``, which applies the components and options that the run file sets.

Combinations of components that would train something other than their names say are refused, each with the reason (the
table is in docs/guides/algorithms.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.policies.advantages.advantage import Advantage, AdvantageInputs
from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.algorithms.algorithm import COMPUTED_BY, OF_BATCH, Algorithm, Denominator
from asyncrl.policies.component import Component, named
from asyncrl.policies.corrections import chains
from asyncrl.policies.corrections.correction import Correction
from asyncrl.policies.losses.aggregation import AGGREGATIONS, Aggregation
from asyncrl.policies.losses.kl import CORRECTED, Penalty
from asyncrl.policies.losses.loss import Loss, LossInputs
from asyncrl.policies.losses.table import LOSSES

P = TypeVar("P", bound=Component)


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """The components of an algorithm, each with the options that the algorithm sets: ``PPOClip(clip_high=0.28)``.

    A loss may be a name in ``LOSSES``, which is loaded when the algorithm is used.
    """

    name: str
    advantage: Advantage
    loss: Loss | str
    aggregation: Aggregation
    correction: tuple[Correction, ...]
    paper: str


def resolve(
    spec: AlgorithmSpec,
    *,
    advantage: str = "",
    loss: str = "",
    aggregation: str = "",
    correction: str = "",
    whitening: Literal["", "unbiased", "biased"] = "",
    denominator: Denominator = "before",
    entropy_coef: float = 0.0,
    kl: Penalty | None = None,
    options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Return the algorithm ``spec`` with the components and hyper-parameters of the run file.

    An option goes to the one component that has it; write ``component.option`` if several components do. A replaced
    component starts from its own defaults. Raises ConfigError, with the reason, for unknown names, values out of range
    and combinations that are wrong."""
    chosen = loss or spec.loss
    components: dict[str, Component] = {
        "advantage": named(advantage, Advantage, ADVANTAGES, where="advantage") if advantage else spec.advantage,
        "loss": chosen if isinstance(chosen, Loss) else named(chosen, Loss, LOSSES, where="loss"),
        "aggregation": (
            named(aggregation, Aggregation, AGGREGATIONS, where="aggregation") if aggregation else spec.aggregation
        ),
    }
    chain = chains.chain(correction or spec.correction)
    steps: dict[str, Component] = {step.name: step for step in chain}
    changes = _dealt(options or {}, components, steps, name=spec.name)
    made = {
        place: component.with_options(changes.get(place, {})) for place, component in {**components, **steps}.items()
    }
    for component in made.values():
        component.check()
    algorithm = Algorithm(
        name=spec.name,
        paper=spec.paper,
        advantage=_as(Advantage, made["advantage"]),
        loss=_as(Loss, made["loss"]),
        aggregation=_as(Aggregation, made["aggregation"]),
        correction=tuple(_as(Correction, made[name]) for name in steps),
        whitening=whitening,
        denominator=denominator,
        entropy_coef=entropy_coef,
        kl=kl,
    )
    refuse_wrong_combinations(algorithm)
    return algorithm


def sets(options: Mapping[str, Any], option: str) -> bool:
    """Return whether the run file's ``options`` set ``option``, with or without a prefix."""
    return any(key.rpartition(".")[2] == option for key in options)


def _dealt(
    options: Mapping[str, Any], components: Mapping[str, Component], steps: Mapping[str, Component], *, name: str
) -> dict[str, dict[str, Any]]:
    """Group the run file's options by the component that owns them."""
    changes: dict[str, dict[str, Any]] = {}
    every = {**components, **steps}
    for key, value in options.items():
        prefix, dot, option = key.rpartition(".")
        owners = [place for place, component in every.items() if option in component.options]
        if dot:
            owners = [place for place in owners if place == prefix or (prefix == "correction" and place in steps)]
        if not owners:
            known = sorted({option for component in every.values() for option in component.options})
            near = difflib.get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]!r}? It has" if near and near[0] != option else "it has"
            raise ConfigError(f"algorithm.options: {name} has no option {key!r}; {hint} {', '.join(known)}")
        if len(owners) > 1:
            prefixes = " or ".join(f"{owner}.{option}" for owner in owners)
            raise ConfigError(f"algorithm.options: {key!r} belongs to several components; write {prefixes}")
        changes.setdefault(owners[0], {})[option] = value
    return changes


def _as(kind: type[P], component: Component) -> P:
    assert isinstance(component, kind)
    return component


def refuse_wrong_combinations(made: Algorithm) -> None:
    """Raise ConfigError for components that would train something other than their names say."""
    _refuse_unknown_inputs(made.loss, {*_names(LossInputs), *COMPUTED_BY, *OF_BATCH, "rewards"})
    _refuse_unknown_inputs(made.advantage, _names(AdvantageInputs))
    ratios = chains.ratios(made.correction)
    if made.loss.is_around_behavior and ratios:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} weights by pi / behavior itself; correction {ratios[0]} would count "
            'that ratio twice. Use correction = "none", or a loss around the proximal policy, such as ppo_clip'
        )
    _refuse_what_teaches_nothing(made)
    _refuse_wrong_whitening(made)
    if made.kl is not None:
        _refuse_wrong_penalty(made, made.kl)
    if made.denominator == "after":
        _refuse_wrong_denominator(made)
    _refuse_masks_that_see_nothing(made)


def _names(inputs: type[LossInputs | AdvantageInputs]) -> set[str]:
    """The fields and properties of ``inputs``."""
    return {field.name for field in fields(inputs)} | {
        name for name, value in vars(inputs).items() if isinstance(value, property)
    }


def _refuse_unknown_inputs(component: Component, known: set[str]) -> None:
    """Reject a formula with a parameter that nothing fills: the names of its parameters are what it gets."""
    for name in component.inputs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? There is" if near else "there is"
            raise ConfigError(
                f"algorithm: the formula of {component.name} takes {name!r}, which is no input; {hint} "
                f"{', '.join(sorted(known))} (an option is a field of the class)"
            )


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
    """Reject components whose result is never used."""
    has_rewards = "advantages" in made.loss.inputs
    if made.outputs_for_advantage and not has_rewards:
        raise ConfigError(
            f"algorithm: loss {made.loss.name} does not look at advantages, which need a pass of another model here; "
            'use a loss such as ppo_clip, or advantage = "none" and no KL in the reward'
        )
    if made.advantage.name == "none" and has_rewards and "teacher" not in made.models:
        raise ConfigError(
            f'algorithm: advantage = "none" leaves loss {made.loss.name} nothing to learn from; it goes with a teacher '
            "(loss opd_reward or opd) or with sft"
        )


def _refuse_wrong_whitening(made: Algorithm) -> None:
    if made.whitening and made.advantage.is_whitened:
        raise ConfigError(
            f"algorithm: advantage {made.advantage.name} is whitened already, and whitening it again would change "
            "nothing but rounding; remove algorithm.whitening, or use an advantage such as reinforce"
        )
    if made.whitening and not made.reads_rewards:
        raise ConfigError(
            f"algorithm.whitening: advantage {made.advantage.name} with loss {made.loss.name} leaves no advantages to "
            "whiten; remove it"
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
