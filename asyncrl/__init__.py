"""Fully asynchronous reinforcement learning for language models.

    run = asyncrl.Run.from_file("run.toml")     load and check a run file
    asyncrl.open_run("runs/demo")               read what a run has recorded

Names in ``__all__`` are imported on first use, so ``import asyncrl`` is fast and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncrl.version import VERSION

if TYPE_CHECKING:
    from asyncrl.launch.api import AsyncRLError, ConfigError, OpenedRun, Run, RunResult, Summary, open_run

__version__ = VERSION
__all__ = ["AsyncRLError", "ConfigError", "OpenedRun", "Run", "RunResult", "Summary", "open_run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("asyncrl.launch.api"), name)
    raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
