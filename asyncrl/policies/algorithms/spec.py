"""A row of the table of algorithms, and ``resolve``, which applies the parts and options that the run file sets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.policies.advantages.advantage import Advantage
from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.algorithms.algorithm import Algorithm, Denominator
from asyncrl.policies.algorithms.combinations import refuse_wrong_combinations
from asyncrl.policies.corrections import chains
from asyncrl.policies.corrections.correction import Correction
from asyncrl.policies.losses.aggregation import AGGREGATIONS, Aggregation
from asyncrl.policies.losses.kl import Penalty
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.table import LOSSES
from asyncrl.policies.parts import Part, named

P = TypeVar("P", bound=Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """The parts of an algorithm, each with the options that the algorithm sets: ``PPOClip(clip_high=0.28)``.

    A loss may be a name in ``LOSSES``, which is loaded when the algorithm is used.
    """

    name: str
    paper: str
    advantage: Advantage
    loss: Loss | str
    aggregation: Aggregation
    correction: tuple[Correction, ...]


def resolve(
    spec: AlgorithmSpec,
    *,
    advantage: str = "",
    loss: str = "",
    aggregation: str = "",
    correction: str = "",
    denominator: Denominator = "before",
    entropy_coef: float = 0.0,
    kl: Penalty | None = None,
    options: Mapping[str, Any] | None = None,
) -> Algorithm:
    """Return the algorithm ``spec`` with the parts and hyper-parameters of the run file.

    An option goes to the one part that has it; write ``part.option`` if several parts do. A replaced part starts from
    its own defaults. Raises ConfigError, with the reason, for unknown names, values out of range and combinations that
    are wrong.
    """
    chosen = loss or spec.loss
    parts: dict[str, Part] = {
        "advantage": named(advantage, Advantage, ADVANTAGES, where="advantage") if advantage else spec.advantage,
        "loss": chosen if isinstance(chosen, Loss) else named(chosen, Loss, LOSSES, where="loss"),
        "aggregation": (
            named(aggregation, Aggregation, AGGREGATIONS, where="aggregation") if aggregation else spec.aggregation
        ),
    }
    chain = chains.chain(correction or spec.correction)
    steps: dict[str, Part] = {step.name: step for step in chain}
    changes = _dealt(options or {}, parts, steps, name=spec.name)
    made = {place: part.with_options(changes.get(place, {})) for place, part in {**parts, **steps}.items()}
    for part in made.values():
        part.check()
    algorithm = Algorithm(
        name=spec.name,
        paper=spec.paper,
        advantage=_as(Advantage, made["advantage"]),
        loss=_as(Loss, made["loss"]),
        aggregation=_as(Aggregation, made["aggregation"]),
        correction=tuple(_as(Correction, made[name]) for name in steps),
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
    options: Mapping[str, Any], parts: Mapping[str, Part], steps: Mapping[str, Part], *, name: str
) -> dict[str, dict[str, Any]]:
    """Group the run file's options by the part that owns them."""
    changes: dict[str, dict[str, Any]] = {}
    every = {**parts, **steps}
    for key, value in options.items():
        prefix, dot, option = key.rpartition(".")
        owners = [place for place, part in every.items() if option in part.options]
        if dot:
            owners = [place for place in owners if place == prefix or (prefix == "correction" and place in steps)]
        if not owners:
            known = sorted({option for part in every.values() for option in part.options})
            near = difflib.get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]!r}? It has" if near and near[0] != option else "it has"
            raise ConfigError(f"algorithm.options: {name} has no option {key!r}; {hint} {', '.join(known)}")
        if len(owners) > 1:
            prefixes = " or ".join(f"{owner}.{option}" for owner in owners)
            raise ConfigError(f"algorithm.options: {key!r} belongs to several parts; write {prefixes}")
        changes.setdefault(owners[0], {})[option] = value
    return changes


def _as(kind: type[P], part: Part) -> P:
    assert isinstance(part, kind)
    return part
