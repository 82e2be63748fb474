"""docs/reference/api.md: what `import asyncrl` and the ports give, as tables, from their docstrings."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, Final

import asyncrl

HEAD: Final = """# Python API

Generated from docstrings by `python docs/reference/make.py`. What you bring yourself (rewards, rollout functions,
engines, ...) implements one of the ports below, whose files have methods, types, shapes and errors
([extending](../develop/extending.md)). [examples/minimal_loop.py](../../examples/minimal_loop.py) wires the actors by
hand.

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
FUNCTIONS: Final = ("rewards", "environments", "data")
ADAPTERS: Final = ("engines", "weights", "backends", "bus", "launch")
"""Their classes alone: who writes an adapter reads its port."""
TABLE: Final = "| name | what it is or does |\n|---|---|\n"


def page() -> str:
    public = {name: getattr(asyncrl, name) for name in asyncrl.__all__ if not name.startswith("__")}
    ports = [_port(room, has_members=True) for room in FUNCTIONS] + [_port(room) for room in ADAPTERS]
    return HEAD + f"\n## asyncrl\n\n{TABLE}{_rows(public)}" + "".join(ports)


def _port(room: str, *, has_members: bool = False) -> str:
    module = importlib.import_module(f"asyncrl.{room}.port")
    link = f"[asyncrl/{room}/port.py](../../asyncrl/{room}/port.py)"
    rows = _rows(_own(module), has_members=has_members)
    return f"\n## {module.__name__}\n\n{link}: {_first_line(module)}\n\n{TABLE}{rows}"


def _own(module: ModuleType) -> dict[str, Any]:
    own = {name: thing for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__}
    return {name: thing for name, thing in own.items() if inspect.isclass(thing) and not name.startswith("_")}


def _rows(things: dict[str, Any], *, has_members: bool = True) -> str:
    return "".join(
        _row(name, thing) + (_members(name, thing) if has_members and inspect.isclass(thing) else "")
        for name, thing in things.items()
    )


def _members(owner: str, kind: type) -> str:
    shown = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    kinds = (property, classmethod, staticmethod)
    return "".join(
        _row(f"{owner}.{name}", value)
        for name, value in shown.items()
        if inspect.isfunction(value) or isinstance(value, kinds)
    )


def _row(name: str, thing: Any) -> str:
    function = getattr(thing, "__func__", thing)
    arguments = ""
    if inspect.isfunction(function):
        found = inspect.signature(function).parameters.values()
        arguments = "(" + ", ".join(one.name for one in found if one.name not in ("self", "cls")) + ")"
    word = "class " if inspect.isclass(thing) else "await " if inspect.iscoroutinefunction(function) else ""
    return f"| `{word}{name}{arguments}` | {_first_line(thing)} |\n"


def _first_line(thing: Any) -> str:
    """The first paragraph of a docstring in one line; empty for the one that dataclasses write."""
    text = inspect.cleandoc(thing.__doc__ or "")
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):
        return ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
