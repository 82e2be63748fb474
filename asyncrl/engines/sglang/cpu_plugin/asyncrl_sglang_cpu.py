"""A plugin of SGLang (sglang.srt.plugins) for a server on a machine without a GPU.

Host buffers: SGLang has a table of how each device's are allocated. A CPU has no row, and gets CUDA's, which pins
memory through the CUDA runtime; only the buffer of routed experts asks for one there.

Processes: the server starts its scheduler of each rank and its detokenizer as new Pythons, since a fork cannot use
CUDA. Each imports for ten seconds what the server has imported. Without CUDA they are forked, as long as the server
has a single thread: a fork has no other, and what another one had locked would stay locked.

This folder is on PYTHONPATH of a CPU server, and the folder beside this file tells SGLang of the plugin.
Tests: tests/integration/sglang/test_transfers.py, tests/unit/engines/sglang/test_server_command.py.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import Any

_SETTLED = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""What SGLang does before it starts processes: among other things it chooses how they are started."""
_THREADS = "/proc/self/task"
"""A folder for each, also for those that Python does not know of. Only Linux has it."""


def register() -> None:
    table = importlib.import_module("sglang.srt.mem_cache.pool_host.common").ALLOC_MEMORY_FUNCS
    table["cpu"] = _pageable
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_SETTLED, fork_if_alone, hooks.HookType.AFTER)


def _pageable(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


def fork_if_alone(_result: None, *_: Any) -> None:
    if os.path.isdir(_THREADS) and len(os.listdir(_THREADS)) == 1:
        multiprocessing.set_start_method("fork", force=True)
