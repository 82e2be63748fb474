"""docs/reference/algorithms.md: every algorithm and every component of one, with its options, from asyncrl/policies."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Mapping
from typing import Final

from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.algorithms.spec import AlgorithmSpec, resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.component import Component, allowed_range, load_class
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.losses.aggregation import AGGREGATIONS
from asyncrl.policies.losses.table import LOSSES

HEAD: Final = """# Algorithms and their components

What `[algorithm]` of the run file names, generated from the tables of `asyncrl/policies` by
`python docs/reference/make.py`. Which to choose, and what may be combined: [algorithms](../guides/algorithms.md). An
option is set in `[algorithm.options]`, here with its default and what it may be; anything else is refused before
anything starts. In formulas, A is the advantage, r a ratio of probabilities, and sg stops the gradient.

## algorithm.name

Options in parentheses differ from the component's own defaults.

| name | advantage | loss | aggregation | correction | source |
|---|---|---|---|---|---|
"""
COMPONENTS: Final[Mapping[str, Mapping[str, type[Component] | str]]] = {
    "algorithm.loss": LOSSES,
    "algorithm.advantage": ADVANTAGES,
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.correction": CORRECTIONS,
}


def page() -> str:
    return HEAD + "".join(map(_algorithm, ALGORITHMS.values())) + "".join(map(_table, COMPONENTS))


def _table(key: str) -> str:
    head = f"\n## {key}\n\n| name | what it computes | options | source |\n|---|---|---|---|\n"
    return head + "".join(_component(load_class(name, COMPONENTS[key])) for name in COMPONENTS[key])


def _algorithm(spec: AlgorithmSpec) -> str:
    components = map(_chosen, (spec.advantage, resolve(spec).loss, spec.aggregation))
    return _row(f"`{spec.name}`", *components, " + ".join(map(_chosen, spec.correction)), spec.paper)


def _chosen(component: Component) -> str:
    own = type(component)().options
    changed = [f"{name} = {_value(value)}" for name, value in component.options.items() if value != own[name]]
    return f"`{component.name}`" + (f" ({', '.join(changed)})" if changed else "")


def _component(kind: type[Component]) -> str:
    options = "; ".join(_option(kind, name, value) for name, value in kind().options.items())
    return _row(f"`{kind.name}`", _first_sentence(kind), options, kind.paper)


def _option(kind: type[Component], name: str, default: object) -> str:
    """Its default, and the range or the words that it may have."""
    allowed = allowed_range(kind, name)
    words = typing.get_args(typing.get_type_hints(kind)[name])
    among = ", ".join(map(_value, words)) if allowed is None else str(dataclasses.replace(allowed, why=""))
    among = "any number" if allowed is not None and math.isinf(allowed.low) else among
    return f"`{name} = {_value(default)}` ({among})"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _first_sentence(kind: type[Component]) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return re.split(r"(?<=[.])\s", text)[0].replace("``", "`").rstrip(".")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
