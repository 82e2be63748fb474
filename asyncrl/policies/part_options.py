"""An option of the run file to the part of the algorithm that has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.policies import correction_chains
from asyncrl.policies.catalogue import CHOICES
from asyncrl.policies.correction_chains import Step


def set_option(parts: dict[str, Any], chain: list[Step], key: str, value: Any, *, name: str) -> None:
    """``part.option``: the part is advantage, loss, aggregation, correction, or the name of one of the corrections."""
    prefix, dot, option = key.rpartition(".")
    steps = {step.name: step for step in chain}
    owners = [place for place, found in (parts | steps).items() if option in found.options]
    if dot:
        owners = [place for place in owners if place == prefix or (prefix == "correction" and place in steps)]
    if not owners:
        known = ", ".join(sorted({option for found in (parts | steps).values() for option in found.options}))
        raise ConfigError(f"algorithm.options: {name} has no option {key!r}; it has {known}")
    if len(owners) > 1:
        prefixes = " or ".join(f"{owner}.{option}" for owner in owners)
        raise ConfigError(f"algorithm.options: {key!r} belongs to several parts; write {prefixes}")
    (owner,) = owners
    if owner in parts:
        found = parts[owner]
        parts[owner] = replace(found, options={**found.options, option: _checked(found.options[option], value, key)})
    else:
        found = steps[owner]
        changes = {option: _checked(found.options[option], value, key)}
        (chain[chain.index(found)],) = correction_chains.chain([{"name": owner, **found.options, **changes}])


def _checked(default: Any, value: Any, key: str) -> Any:
    if isinstance(default, str):
        choices = CHOICES.get(key.rpartition(".")[2], ())
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = " or ".join(choices) or f"a word such as {default!r}"
            raise ConfigError(f"algorithm.options: {key} must be {wanted}, got {value!r}")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ConfigError(f"algorithm.options: {key} must be a number, got {value!r}")
    if value < 0 and default >= 0:
        raise ConfigError(f"algorithm.options: {key} must be >= 0, got {value}")
    return float(value)
