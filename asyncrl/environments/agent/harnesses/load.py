"""Load the Harness of rollout.options.harness: a built-in one by name, or your own as "package.module:Harness".

A built-in harness is a class with an ``Options`` in the same module; the worker instantiates it. Your own code never
runs in the worker. Child processes import it, possibly in another virtual environment (python_harness.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.config import plugins, tables
from asyncrl.environments.agent.harnesses.limits import Limited, Limits
from asyncrl.errors import ConfigError

_HERE: Final = "asyncrl.environments.agent.harnesses"
HARNESSES: Final = {
    "command": f"{_HERE}.command:CommandHarness",
    "verifiers": f"{_HERE}.verifiers:VerifiersHarness",
    "outside": f"{_HERE}.outside:OutsideHarness",
}


def load_harness(name: str, options: Mapping[str, Any], *, limits: Limits, where: str = "rollout.options") -> Limited:
    """Return the harness wrapped in its limits, ready to be called. Starts no process.

    name     a key of HARNESSES, or "package.module:object" of a function or class that a child imports
    options  [rollout.options.harness_options]: fields of the harness's Options; of PythonHarness's for your own harness
    Raises ConfigError naming a key under ``where``, also if a program or virtual environment is missing.
    """
    kind = plugins.load(_address(name, where), where=f"{where}.harness", table=HARNESSES, kind=type)
    arguments: tuple[Any, ...] = (
        tables.build(sys.modules[kind.__module__].Options, options, f"{where}.harness_options"),
    )
    if name not in HARNESSES:
        arguments = (name, *arguments)
    return Limited(plugins.make(kind, *arguments, where=f"{where}.harness", name=name), name=name, limits=limits)


def _address(name: str, where: str) -> str:
    """Return the address of the class that runs the harness."""
    if name in HARNESSES or ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{where}.harness: {name!r} is not an address; write package.module:Harness")
    return f"{_HERE}.python_harness:PythonHarness"
