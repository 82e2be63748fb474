"""A plugin of SGLang (sglang.srt.plugins): host buffers on a machine without a GPU.

SGLang has a table of how each device's host buffers are allocated. A CPU has no row, and gets CUDA's, which pins memory
through the CUDA runtime; only the buffer of routed experts asks for one there. This folder is on PYTHONPATH of a CPU
server, and the folder beside this file tells SGLang of the plugin.
Tests: tests/integration/sglang/test_transfers.py, tests/unit/engines/sglang/test_server_command.py.
"""

from __future__ import annotations

import importlib
from typing import Any


def register() -> None:
    table = importlib.import_module("sglang.srt.mem_cache.pool_host.common").ALLOC_MEMORY_FUNCS
    table["cpu"] = _pageable


def _pageable(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)
