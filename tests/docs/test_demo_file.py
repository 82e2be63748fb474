"""examples/demo.toml is the reference of the run file: it shows every section and every key, each with a comment."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection
from typing import Any

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.environments.load import FUNCTIONS
from asyncrl.launch.launchers.adapter import LAUNCHERS
from asyncrl.rewards.load import KINDS
from tests import ROOT

DEMO = ROOT / "examples" / "demo.toml"

DATASETS = "evaluation.datasets"

NOT_FOR_USERS = {"bus": {"address"}}
"""Keys that `asyncrl run` sets for its processes."""


def shown() -> dict[str, dict[str, str]]:
    """Return section -> key -> its line. Commented lines count; [SECTION.options] is the key ``options``, and
    [servers.judge] shows the keys of any server.

    [[evaluation.datasets]] is the key ``datasets``, and also a section of its own.
    """
    sections: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for line in DEMO.read_text().splitlines():
        if line.startswith("# [[evaluation.datasets]]"):
            keys["datasets"], keys = line, sections.setdefault(DATASETS, {})
        elif header := re.match(r"(?:# )?\[(\w+)(\.options|\.judge)?\]", line):
            keys = sections.setdefault(header[1], {})
            if header[2] == ".options":
                keys["options"], keys = line, {}
        elif key := re.match(r"(?:# )?(\w+) = ", line):
            keys[key[1]] = line
    return sections


def section_class(hint: Any) -> Any:
    """Return the dataclass of a field of RunConfig, also if the field may be None."""
    return hint if dataclasses.is_dataclass(hint) else next(kind for kind in typing.get_args(hint) if kind is not str)


def test_demo_file_has_every_section_and_key() -> None:
    hints = typing.get_type_hints(config.RunConfig)
    kinds = {name: section_class(hint) for name, hint in hints.items()} | {DATASETS: config.EvaluationDataset}
    known = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in kinds.items()}
    assert {name: set(keys) for name, keys in shown().items()} == {
        name: keys - NOT_FOR_USERS.get(name, set()) for name, keys in known.items()
    }


TABLES: dict[str, Collection[str]] = {
    "reward.kind": KINDS,
    "rollout.function": FUNCTIONS,
    "engine.kind": registry.ENGINES,
    "learner.backend": registry.BACKENDS,
    "weights.channel": registry.CHANNELS,
    "launcher.kind": LAUNCHERS,
    "bus.kind": registry.BUSES,
    "algorithm.filters": registry.FILTERS,
}


def explained(key: str) -> list[str]:
    """Return the names in the key's table in the reference."""
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    return re.findall(r"(?m)^\| `(\w+)` \| \S", page.partition(f"\n### {key}\n")[2].partition("\n#")[0])


def choices(text: str) -> set[str]:
    """Return the names that a comment lists before the user's own: ``a | b (what it does) | "package.module:name"``."""
    offered = re.sub(r"\([^()]*\)", "", text.partition('"package.module')[0])
    return {name.strip() for name in offered.split("|")} - {""}


@pytest.mark.parametrize("key", TABLES)
def test_demo_file_lists_the_available_names(key: str) -> None:
    section, _, name = key.partition(".")
    comment = shown()[section][name].partition("#")[2]
    assert choices(comment) == set(TABLES[key])
    assert explained(key) == list(TABLES[key])
