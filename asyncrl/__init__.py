"""Fully asynchronous reinforcement learning for language models.

    run = asyncrl.Run.from_file("run.toml")     check it, train it
    asyncrl.open_run("runs/demo")               what a run has recorded

What is listed in ``__all__`` is imported when it is first used: ``import asyncrl`` is fast and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncrl.version import VERSION

if TYPE_CHECKING:
    from asyncrl.run.api import AsyncRLError, ConfigError, OpenedRun, Run, RunResult, Summary, open_run

__version__ = VERSION
__all__ = ["AsyncRLError", "ConfigError", "OpenedRun", "Run", "RunResult", "Summary", "open_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("asyncrl.run.api"), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
