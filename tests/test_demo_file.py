"""examples/demo.toml is the reference of the run file: every section, every key, a comment for each."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

from asyncrl import config

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"

NOT_FOR_USERS = {"bus": {"address"}}
"""`asyncrl run` tells its processes."""


def shown() -> dict[str, dict[str, str]]:
    """Section -> key -> its line. What is commented out counts; [SECTION.options] is the key ``options``."""
    sections: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for line in DEMO.read_text().splitlines():
        if header := re.match(r"(?:# )?\[(\w+)(\.options)?\]", line):
            keys = sections.setdefault(header[1], {})
            if header[2]:
                keys["options"], keys = line, {}
        elif key := re.match(r"(?:# )?(\w+) = ", line):
            keys[key[1]] = line
    return sections


def section_class(hint: Any) -> Any:
    """Of a field of RunConfig: the dataclass, also of one that may be None."""
    return hint if dataclasses.is_dataclass(hint) else typing.get_args(hint)[0]


def test_it_has_every_section_and_every_key_and_no_others() -> None:
    hints = typing.get_type_hints(config.RunConfig)
    known = {name: {field.name for field in dataclasses.fields(section_class(hint))} for name, hint in hints.items()}
    assert {name: set(keys) for name, keys in shown().items()} == {
        name: keys - NOT_FOR_USERS.get(name, set()) for name, keys in known.items()
    }


def test_every_key_has_a_comment() -> None:
    bare = [line for keys in shown().values() for line in keys.values() if "#" not in line.removeprefix("# ")]
    assert bare == []
