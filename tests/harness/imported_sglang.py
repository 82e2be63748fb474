"""What an SGLang server on a CPU imports, in the order in which it does. forks.py imports it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from sglang.srt.plugins import load_plugins

_modules: dict[str, Any] = sys.modules
_modules["megatron"] = None  # is not there: a debugging aid of SGLang would import it, and wandb and tensorboard by it

load_plugins()  # a plugin replaces functions before others import them
for _module in (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
):
    importlib.import_module(_module)
