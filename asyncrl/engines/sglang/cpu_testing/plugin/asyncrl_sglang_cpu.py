"""A plugin of SGLang (sglang.srt.plugins) for a server on a machine without a GPU.

Host buffers: SGLang looks up in a table how to allocate host buffers for each device. The table has no row for "cpu",
so a CPU server would use CUDA's allocator, which pins memory through the CUDA runtime. On a CPU, only the buffer of
routed experts is allocated through this table.

Processes: the server starts the scheduler of each rank and the detokenizer as new Python processes, since a forked
process cannot use CUDA. Each takes ten seconds to import what the server has already imported. Without CUDA they can be
forked, provided the server has a single thread: a fork copies no other threads, and a lock held by one would stay
locked.

Gates: the gate of a shared expert (Qwen2-MoE) is a Triton kernel, which needs a GPU.

This folder is on PYTHONPATH of a CPU server. The dist-info folder next to this file registers the plugin with SGLang.
Tests: tests/integration/sglang/test_transfers.py, tests/unit/engines/sglang/test_server_command.py.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import Any

_SETTLED = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""The function that SGLang calls before it starts processes. Among other things it sets how processes are started."""
_GATE = "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul"
_THREADS = "/proc/self/task"
"""Has one folder per thread, including threads that Python does not know of. Linux only."""


def register() -> None:
    table = importlib.import_module("sglang.srt.mem_cache.pool_host.common").ALLOC_MEMORY_FUNCS
    table["cpu"] = _pageable
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_SETTLED, fork_if_alone, hooks.HookType.AFTER)
    hooks.HookRegistry.register(_GATE, gated, hooks.HookType.REPLACE)


def _pageable(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


def gated(hidden: Any, gate: Any, shared: Any, output: Any, *, do_add: bool) -> None:
    """Write sigmoid(hidden . gate) x shared to ``output``, or add it.  hidden, shared, output [n, H]; gate [H]"""
    added = (hidden.float() @ gate.float()).sigmoid()[:, None] * shared.float()
    output.copy_(output.float() + added if do_add else added)


def fork_if_alone(_result: None, *_: Any) -> None:
    if os.path.isdir(_THREADS) and len(os.listdir(_THREADS)) == 1:
        multiprocessing.set_start_method("fork", force=True)
