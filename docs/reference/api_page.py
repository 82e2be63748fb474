"""docs/reference/api.md: what `import asyncrl` and the module of ports give, from their docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from types import ModuleType
from typing import Any, Final

import asyncrl

HEAD: Final = """# Python API

Generated from docstrings by `python docs/reference/make.py`. What you bring yourself (rewards, rollout functions,
engines, ...) implements one of the ports below, each in `port.py` beside its adapters.
[examples/minimal_loop.py](../../examples/minimal_loop.py) wires the actors by hand.

```python
import asyncrl

run = asyncrl.Run.from_file("my_run.toml", overrides={"run.steps": 10})
print(run.check())  # what the file means; ConfigError in one line where it cannot work
result = run.train_sync()  # or `await run.train()`; what `asyncrl run` would start
print(result.reason, result.model)

recorded = asyncrl.open_run("runs/tutorial")
rows = list(recorded.metrics())  # dicts, which pandas.DataFrame takes; also groups() and trajectories()
```
"""


PORTS: Final = ("rewards", "environments", "data", "engines", "weights", "backends", "bus", "launch")


def page() -> str:
    ports = (f"asyncrl.{room}.port" for room in PORTS)
    return HEAD + _module(asyncrl, "asyncrl") + "".join(_port(importlib.import_module(name)) for name in ports)


def _port(module: ModuleType) -> str:
    own = (name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__)
    parts = [_entry(name, getattr(module, name)) for name in own if not name.startswith("_")]
    return f"\n## {module.__name__}\n\n{_prose(inspect.cleandoc(module.__doc__ or ''))}\n" + "".join(parts)


def _module(module: ModuleType, name: str) -> str:
    names = [entry for entry in getattr(module, "__all__", ()) if not entry.startswith("__")]
    parts = [_entry(entry, getattr(module, entry)) for entry in names]
    return f"\n## {name}\n\n{_prose(inspect.cleandoc(module.__doc__ or ''))}\n" + "".join(parts)


def _entry(name: str, thing: Any) -> str:
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return f"\n### {name}\n\n`{thing!r}`\n"
    parts = [f"\n### {name}\n\n{_block(_signature(name, thing))}{_said(thing)}"]
    if inspect.isclass(thing):
        members = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
        parts += [_member(f"{name}.{key}", value) for key, value in members.items()]
    return "".join(parts)


def _member(name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"\n{_block(f'{name}: ' + str(inspect.signature(value.fget).return_annotation))}{_said(value)}"  # type: ignore[arg-type]
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return f"\n{_block(_signature(name, function))}{_said(function)}" if inspect.isfunction(function) else ""


def _block(signature: str) -> str:
    return f"```text\n{signature}\n```\n"


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and (getattr(thing, "_is_protocol", False) or issubclass(thing, (Enum, BaseException))):
        return f"class {name}({thing.__mro__[1].__name__})"
    asynchronous = inspect.iscoroutinefunction(thing) or inspect.isasyncgenfunction(thing)
    word = "class" if inspect.isclass(thing) else "async def" if asynchronous else "def"
    made = inspect.signature(thing)
    said = [str(parameter) for parameter in map(_plain, made.parameters.values())]
    if any(one.kind is inspect.Parameter.KEYWORD_ONLY for one in made.parameters.values()):
        first = next(i for i, one in enumerate(made.parameters.values()) if one.kind is inspect.Parameter.KEYWORD_ONLY)
        said.insert(first, "*")
    gives = made.return_annotation
    behind = "" if inspect.isclass(thing) or gives is inspect.Signature.empty else f" -> {gives}"
    line = f"{word} {name}({', '.join(said)}){behind}"
    return line if len(line) <= 100 else f"{word} {name}(\n    " + ",\n    ".join(said) + f",\n){behind}"


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """Its annotation as written in the source, without quotes."""
    if not isinstance(parameter.annotation, str):
        return parameter
    return parameter.replace(annotation=_Raw(parameter.annotation))


class _Raw:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _said(thing: Any) -> str:
    said = inspect.cleandoc(thing.__doc__ or "")
    return "" if not said or inspect.isclass(thing) and said.startswith(f"{thing.__name__}(") else f"\n{_prose(said)}\n"


def _prose(text: str) -> str:
    """Text with columns stays as it is."""
    has_columns = any(re.search(r"\S {2,}\S", line) for line in text.splitlines())
    return f"```text\n{text}\n```" if has_columns else text
