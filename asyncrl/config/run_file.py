"""Reads a run file and applies overrides from the command line."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.config.run import RunConfig
from asyncrl.config.secret_values import hide_credentials
from asyncrl.config.tables import build
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError

_PART: Final = re.compile(r"""[^.="']+|"[^"\\]+"|'[^']+'""")
_ITEM: Final = re.compile(rf"((?:{_PART.pattern})(?:\.(?:{_PART.pattern}))+)=(.*)", re.DOTALL)
"""section.key=value"""
_MAY_BE_SECRET: Final = re.compile("token|secret|passw|api.?key|credential|cookie|auth|header", re.IGNORECASE)
"""Words in a line that is no TOML; it is shown without its value then."""


def only_overrides(overrides: Iterable[str], *, where: str = "--set") -> RunConfig:
    """Return settings without a run file, model or data, for commands that need only the bus and the run's name.

    where  option after which the user wrote the overrides
    """
    table: dict[str, Any] = {"model": {"path": ""}, "data": {"path": ""}}
    for item in overrides:
        override(table, item)
    return from_table(table, where=where)


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Load the run file at ``path`` and apply ``section.key=value`` overrides. Raises ConfigError."""
    table = read_table(path)
    for item in overrides:
        override(table, item)
    return from_table(table, where=str(path))


def read_table(path: Path) -> dict[str, Any]:
    """Read a file as TOML. Raises ConfigError, with the line that is none."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte-order mark
        return tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; copy examples/demo.toml, which explains every key") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the run file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}{_place(error, text)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists and tables are nested too deep to be read") from None


def _place(error: tomllib.TOMLDecodeError, text: str) -> str:
    """Return ":LINE: what is wrong in that line" of an error, which says "... (at line 3, column 7)"."""
    what, _, place = str(error).removesuffix(")").rpartition(" (at ")
    lines = text.rstrip().split("\n")
    found = re.fullmatch(r"line (\d+), column \d+", place)  # else: end of document
    number = int(found[1]) if found else len(lines)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    key, equals, _ = line.partition("=")
    shown = f"{key.strip()} = ..." if equals and _MAY_BE_SECRET.search(line) else hide_credentials(line)
    return f":{number}: {what} in: {shown if len(shown) <= 80 else shown[:77] + '...'}"


def from_table(table: Mapping[str, Any], *, where: str) -> RunConfig:
    """Build a RunConfig from the table of a run file; missing sections get their defaults.

    Raises ConfigError naming ``where`` and the key.
    """
    _refuse_penalties(table, where)
    return build(RunConfig, table, where)


def _refuse_penalties(table: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a key that other frameworks have in [rollout] and that asyncrl must not have."""
    section = table.get("rollout")
    for key in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if isinstance(section, Mapping) and key in section:
            raise ConfigError(
                f"{where}: rollout.{key} changes the distribution that answers are sampled from, by tokens that the "
                "trainer cannot see, so every behavior logprob would be wrong; remove it (an evaluation may set it)"
            )


def override(table: dict[str, Any], item: str) -> None:
    """Set one ``section.key=value`` in the table of a run file. A quoted key may contain dots. Raises ConfigError."""
    found = _ITEM.fullmatch(item)
    if found is None:
        raise ConfigError(f"--set {item}: write section.key=value, such as run.steps=10")
    dotted, text = found.groups()
    *parents, key = (part[1:-1] if part[0] in "\"'" else part for part in _PART.findall(dotted))
    node = table
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {item}: {parent} is a value, not a section")
    try:
        made = tomllib.loads(f"value = {text}")
    except RecursionError:
        raise ConfigError(f"--set {dotted}: lists and tables are nested too deep to be read") from None
    except tomllib.TOMLDecodeError as error:
        # such a value was meant as TOML; it may be a secret, so the message does not show it
        if text.lstrip()[:1] in ("'", '"', "[", "{"):
            raise ConfigError(f"--set {dotted}: its value begins as a TOML value and is none: {error}") from None
        made = {"value": text}  # a bare word is a string: --set engine.kind=sglang
    node[key] = made["value"]


def override_items(overrides: Iterable[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides as a tuple of "section.key=value".

    Accepts {"run.steps": 10} or ["run.steps=10"]. Raises ConfigError for a value that TOML has not.
    """
    if isinstance(overrides, Mapping):
        return tuple(f"{key}={toml_text(_plain(value, str(key)))}" for key, value in overrides.items())
    return tuple(overrides)


def _plain(value: Any, key: str) -> Any:
    """Convert ``value`` to types that TOML has. Raises ConfigError."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one, f"{key}.{name}") for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, key) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or not isinstance(value, str | bool | int | float):
        hint = "; leave the key out for its default" if value is None else ""
        raise ConfigError(f"overrides: {key} is a {type(value).__name__}, which a run file cannot hold{hint}")
    return value
