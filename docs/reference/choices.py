"""What the run file chooses by name: every table of the code, as configuration.md and examples/demo.toml show it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncrl.adapters import registry
from asyncrl.environments.load import FUNCTIONS
from asyncrl.launch.launchers.adapter import LAUNCHERS
from asyncrl.rewards.load import KINDS

DEMO: Final = Path(__file__).parents[2] / "examples" / "demo.toml"
TABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "reward.kind": KINDS,
    "rollout.function": FUNCTIONS,
    "engine.kind": registry.ENGINES,
    "servers.kind": registry.SERVERS,
    "learner.backend": registry.BACKENDS,
    "algorithm.filters": registry.FILTERS,
    "weights.channel": registry.CHANNELS,
    "launcher.kind": LAUNCHERS,
    "bus.kind": registry.BUSES,
}
"""section.key -> name -> "package.module:object"."""


def rows(key: str) -> list[str]:
    """A row of a table for each name: `name` | what it is."""
    return [f"| `{name}` | {_meaning(address)} |" for name, address in TABLES[key].items()]


def demo() -> str:
    """examples/demo.toml with the names that there are; what it says of one in parentheses stays."""
    section, lines = "", []
    for line in DEMO.read_text().splitlines(keepends=True):
        if header := re.match(r"(?:# )?\[(\w+)\]", line):
            section = header[1]
        key = re.match(r"(\w+) = ", line)
        table = TABLES.get(f"{section}.{key[1]}") if key else None
        lines.append(line if table is None else _with_names(line, table))
    return "".join(lines)


def _with_names(line: str, table: Mapping[str, str]) -> str:
    value, _, comment = line.partition("# ")
    offered, mark, rest = comment.partition('"package.module')
    said = {part.partition(" (")[0].strip(): part.strip() for part in offered.split(" | ")}
    names = [*(name for name in said if name in table), *(name for name in table if name not in said)]
    return f"{value}# {' | '.join(said.get(name, name) for name in names)} | {mark}{rest}"


def _meaning(address: str) -> str:
    """The first sentence about a function, or about the module of a class."""
    module_name, _, name = address.partition(":")
    module = importlib.import_module(module_name)
    found = getattr(module, name)
    about = found if inspect.isfunction(found) and found.__doc__ else module
    text = " ".join(str(about.__doc__).split())
    text = re.sub(r"^\w+\.\w+ = \"\w+\": ", "", text)
    sentence = re.split(r"(?<=[.?])(?<!et al\.)\s", text)[0]
    return (sentence[0].upper() + sentence[1:]).replace("``", "`").replace("|", "\\|")
