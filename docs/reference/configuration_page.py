"""docs/reference/configuration.md: every key of the run file with its type, default and meaning."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal

from choices import DEMO, TABLES, rows

from asyncrl import config

_NAMED: Final = ("parts", "pools")
"""Keys of tables by a name that the user chooses."""
_LISTED: Final = {
    "data": ("data.files", config.DataFile),
    "evaluation": ("evaluation.datasets", config.EvaluationDataset),
}
"""Section -> its table that may be there several times."""
_NAMES: Final = {int: "whole number", float: "number", str: "text", bool: "true, false"}

HEAD: Final = (
    "# The run file\n\n"
    "Every key with its type, default and meaning. Generated from the code by `python docs/reference/make.py`. A key "
    "that is not in the file keeps its default; `--set section.key=value` overrides it for one run; "
    "`asyncrl check RUN.toml` prints what follows from all of them. "
    "[examples/demo.toml](../../examples/demo.toml) is a complete file, "
    "[examples/gpu.toml](../../examples/gpu.toml) one for a machine with GPUs.\n"
)


def page() -> str:
    parts = [HEAD]
    comments = _comments()
    for name, hint in typing.get_type_hints(config.RunConfig).items():
        kind = _class(hint)
        required = " (required)" if name in ("model", "data") else ""
        is_named = typing.get_origin(hint) is Mapping
        absent = " (absent: none)" if kind is not hint else ""
        title = f"{name}.NAME" if is_named else name
        parts.append(f"\n## [{title}]{required}{absent}\n\n" + _table(kind, name, comments.get(name, {})))
        for key, inner in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(inner):
                parts.append(f"\n### [{name}.{key}]\n\n" + _table(inner, f"{name}.{key}", {}))
            elif dataclasses.is_dataclass(one := next(reversed(typing.get_args(inner)), None)) and key in _NAMED:
                parts.append(f"\n### [{name}.{key}.NAME]\n\n" + _table(one, f"{name}.{key}", {}))
        if name in _LISTED:
            listed, one = _LISTED[name]
            parts.append(f"\n### [[{listed}]]\n\n" + _table(one, listed, {}))
        for named in (named for named in TABLES if named.startswith(f"{name}.")):
            parts.append("\n".join([f"\n### {named}\n", "| name | what it is |", "|---|---|", *rows(named), ""]))
            for adapter, address in TABLES[named].items():
                if (options := _options(address)) is not None:
                    its = "servers.NAME" if name == "servers" else name
                    title = f"\n### [{its}.options] of `{adapter}`\n\n"
                    parts.append(title + _table(options, f"{name}.options", {}))
    return "".join(parts)


def _table(kind: Any, section: str, comments: Mapping[str, str]) -> str:
    meanings = _meanings(kind)
    hints = typing.get_type_hints(kind)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        meaning = meanings.get(field.name) or comments.get(field.name, "")
        cells = (f"`{field.name}`", _type(hints[field.name]), _default(field), meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _meanings(kind: type) -> dict[str, str]:
    """The text behind each field of a dataclass, those of the class that it derives from too."""
    (made,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(made, ast.ClassDef)
    found = _meanings(kind.__base__) if dataclasses.is_dataclass(kind.__base__) else {}
    for before, behind in zip(made.body, made.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(behind, ast.Expr):
            text = behind.value.value if isinstance(behind.value, ast.Constant) else ""
            found[before.target.id] = " ".join(str(text).split())
    return found


def _comments() -> dict[str, dict[str, str]]:
    """Section -> key -> its comment in the demo's run file, for keys that need no more."""
    found: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for line in DEMO.read_text().splitlines():
        if header := re.match(r"(?:# )?\[(\w+)\]", line):
            keys = found.setdefault(header[1], {})
        elif key := re.match(r"(?:# )?(\w+) = [^#]*#\s*(.*)", line):
            keys[key[1]] = key[2]
    return found


def _options(address: str) -> Any:
    """The Options beside an adapter; None when it takes none."""
    module, _, name = address.partition(":")
    adapter = getattr(importlib.import_module(module), name)
    return getattr(adapter, "options_type", None) or getattr(sys.modules[adapter.__module__], "Options", None)


def _class(hint: Any) -> Any:
    return hint if dataclasses.is_dataclass(hint) else next(kind for kind in typing.get_args(hint) if kind is not str)


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments if value != "")
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        return ", ".join(_type(one) for one in arguments if one is not types.NoneType)
    if dataclasses.is_dataclass(hint) or (origin is not None and issubclass(origin, Mapping)):
        return "table"
    return _NAMES.get(hint, str(getattr(hint, "__name__", hint)))


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        if dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)  # type: ignore[arg-type]
    else:
        return "required"
    return f"`{_toml(value)}`" if value is not None else ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\n", "\\n") + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return str(value)
