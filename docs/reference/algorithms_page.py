"""docs/reference/algorithms.md: every algorithm and every part of one, with its options, from asyncrl/policies."""

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
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.losses.aggregation import AGGREGATIONS
from asyncrl.policies.losses.table import LOSSES
from asyncrl.policies.parts import Part, allowed_range, load_class

HEAD: Final = """# Algorithms and their parts

What `[algorithm]` of the run file names, generated from the tables of `asyncrl/policies` by
`python docs/reference/make.py`. Which to choose, and what may be combined: [algorithms](../guides/algorithms.md). An
option is set in `[algorithm.options]`, here with its default and what it may be; anything else is refused before
anything starts. In formulas, A is the advantage, r a ratio of probabilities, and sg stops the gradient.

## algorithm.name

Options in parentheses differ from the part's own defaults.

| name | advantage | loss | aggregation | correction | source |
|---|---|---|---|---|---|
"""
PARTS: Final[Mapping[str, Mapping[str, type[Part] | str]]] = {
    "algorithm.loss": LOSSES,
    "algorithm.advantage": ADVANTAGES,
    "algorithm.aggregation": AGGREGATIONS,
    "algorithm.correction": CORRECTIONS,
}


def page() -> str:
    return HEAD + "".join(map(_algorithm, ALGORITHMS.values())) + "".join(map(_table, PARTS))


def _table(key: str) -> str:
    head = f"\n## {key}\n\n| name | what it computes | options | source |\n|---|---|---|---|\n"
    return head + "".join(_part(load_class(name, PARTS[key])) for name in PARTS[key])


def _algorithm(spec: AlgorithmSpec) -> str:
    parts = map(_chosen, (spec.advantage, resolve(spec).loss, spec.aggregation))
    return _row(f"`{spec.name}`", *parts, " + ".join(map(_chosen, spec.correction)), spec.paper)


def _chosen(part: Part) -> str:
    own = type(part)().options
    changed = [f"{name} = {_value(value)}" for name, value in part.options.items() if value != own[name]]
    return f"`{part.name}`" + (f" ({', '.join(changed)})" if changed else "")


def _part(kind: type[Part]) -> str:
    options = "; ".join(_option(kind, name, value) for name, value in kind().options.items())
    return _row(f"`{kind.name}`", _first_sentence(kind), options, kind.paper)


def _option(kind: type[Part], name: str, default: object) -> str:
    """Its default, and the range or the words that it may have."""
    allowed = allowed_range(kind, name)
    words = typing.get_args(typing.get_type_hints(kind)[name])
    among = ", ".join(map(_value, words)) if allowed is None else str(dataclasses.replace(allowed, why=""))
    among = "any number" if allowed is not None and math.isinf(allowed.low) else among
    return f"`{name} = {_value(default)}` ({among})"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _first_sentence(kind: type[Part]) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return re.split(r"(?<=[.])\s", text)[0].replace("``", "`").rstrip(".")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
