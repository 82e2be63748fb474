"""The page for users of slime: keys, values and commands that it names exist."""

from __future__ import annotations

import re
from collections import defaultdict

from asyncrl.adapters import registry
from asyncrl.backends.megatron.transformer_config import KEYS as MEGATRON
from asyncrl.environments.load import FUNCTIONS
from asyncrl.launch.launchers.adapter import LAUNCHERS
from asyncrl.rewards.load import KINDS
from tests import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "start" / "from_slime.md").read_text()
ROW = re.compile(r"^\| (S?\d+) \| (.+?) \| (.+?) \| \*\*(.+?)\*\*(?:: (.+?))? \|$", re.MULTILINE)
ROWS = {number: (ours, state, why) for number, _, ours, state, why in ROW.findall(PAGE)}
REFERENCE = (DOCS / "reference" / "configuration.md").read_text()  # test_reference.py holds it to the code
NAMES = (DOCS / "reference" / "algorithms.md").read_text()
COMMANDS = set(re.findall(r"^## asyncrl ([\w-]+)", (DOCS / "reference" / "cli.md").read_text(), re.MULTILINE))


NAMED = {
    "bus.kind": registry.BUSES,
    "engine.kind": registry.ENGINES,
    "launcher.kind": LAUNCHERS,
    "learner.backend": registry.BACKENDS,
    "reward.kind": KINDS,
    "rollout.function": FUNCTIONS,
    "weights.channel": registry.CHANNELS,
}
"""Keys whose values are names of parts."""


def keys() -> dict[str, dict[str, str]]:
    """Return what names the values of each key, by section: "learner", "learner.options" (of all backends),
    "evaluation.datasets"."""
    found, section = defaultdict[str, dict[str, str]](dict), ""
    for line in REFERENCE.splitlines():
        if heading := re.match(r"#+ \[*([\w.]+)\]*", line):
            section = heading[1]
        elif key := re.match(r"\| `([\w-]+)` \|", line):
            found[section][key[1]] = found[section].get(key[1], "") + line
    for section, table in re.findall(r"^## algorithm\.(\w+)\n(.*?)(?=^## |\Z)", NAMES, re.MULTILINE | re.DOTALL):
        found["algorithm"][section] = " ".join(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    for path, names in NAMED.items():
        section, _, key = path.rpartition(".")
        found[section][key] = " ".join(names)
    return found


KEYS = keys()
SECTIONS = {name.partition(".")[0] for name in KEYS}
CODE = {code for ours, _, why in ROWS.values() for code in re.findall(r"`([^`]+)`", f"{ours} {why}")}


def test_every_feature_has_a_row() -> None:
    assert list(ROWS) == [*map(str, range(1, 262)), *(f"S{number}" for number in range(1, 22))]


def test_a_state_is_one_of_four_and_what_does_not_work_has_a_reason() -> None:
    assert {state for _, state, _ in ROWS.values()} == {"yes", "half", "no", "n/a"}
    assert [number for number, (_, state, why) in ROWS.items() if (state == "yes") == bool(why)] == []


def test_every_key_exists_and_takes_the_value_that_is_named() -> None:
    wrong = []
    for code in sorted(code for code in CODE if code.partition(".")[0] in SECTIONS):
        path, _, value = code.partition(" = ")
        section, _, key = path.rpartition(".")
        words = [] if "package.module" in value else re.findall(r"[a-z_]\w*", value)
        if key not in KEYS[section] or not all(re.search(rf"\b{word}\b", KEYS[section][key]) for word in words):
            wrong.append(code)
    assert wrong == []


def test_a_name_of_megatron_s_is_refused_with_a_key_that_exists() -> None:
    assert [key for key in MEGATRON.values() if key.rpartition(".")[2] not in KEYS[key.rpartition(".")[0]]] == []


def test_every_command_and_section_exists() -> None:
    commands = {code.split()[1] for code in CODE if code.startswith("asyncrl ")}
    sections = {code.strip("[]") for code in CODE if code.startswith("[")}
    assert (commands - COMMANDS, sections - set(KEYS)) == (set(), set())
