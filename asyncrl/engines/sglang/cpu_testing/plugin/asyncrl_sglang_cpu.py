"""A plugin of SGLang (sglang.srt.plugins) for a server on a machine without a GPU.

Host buffers: SGLang looks up in a table how to allocate host buffers for each device. The table has no row for "cpu",
so a CPU server would use CUDA's allocator, which pins memory through the CUDA runtime. On a CPU, only the buffer of
routed experts is allocated through this table.

Processes: the server starts the scheduler of each rank and the detokenizer as new Python processes, since a forked
process cannot use CUDA. Each takes ten seconds to import what the server has already imported. Without CUDA they can be
forked, provided the server has a single thread: a fork copies no other threads, and a lock held by one would stay
locked.

Gates: the gate of a shared expert (Qwen2-MoE) is a Triton kernel, which needs a GPU.

Deterministic inference: SGLang's batch-invariant products are Triton kernels, and its CPU attention, which computes one
request at a time and so needs nothing, is not on its list. Here products are computed one row at a time, and numbers
are drawn from seeds by splitmix64 (Steele et al. 2014), as the kernel that draws them is not installed.

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
_INVARIANT = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
_HASH = "sglang.srt.layers.sampler.murmur_hash32"
_THREADS = "/proc/self/task"
"""Has one folder per thread, including threads that Python does not know of. Linux only."""

_KEPT: list[Any] = []
"""Kernels that torch forgets with their library."""


def register() -> None:
    table = importlib.import_module("sglang.srt.mem_cache.pool_host.common").ALLOC_MEMORY_FUNCS
    table["cpu"] = _pageable
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_SETTLED, fork_if_alone, hooks.HookType.AFTER)
    hooks.HookRegistry.register(_GATE, gated, hooks.HookType.REPLACE)
    importlib.import_module("sglang.srt.arg_groups.choices").add_deterministic_attention_backend_choices(
        ["torch_native"]
    )
    hooks.HookRegistry.register(_INVARIANT, multiply_rows_alone, hooks.HookType.REPLACE)
    hooks.HookRegistry.register(_HASH, hash_seeds, hooks.HookType.REPLACE)


def _pageable(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


def gated(hidden: Any, gate: Any, shared: Any, output: Any, *, do_add: bool) -> None:
    """Write sigmoid(hidden . gate) x shared to ``output``, or add it.  hidden, shared, output [n, H]; gate [H]"""
    added = (hidden.float() @ gate.float()).sigmoid()[:, None] * shared.float()
    output.copy_(output.float() + added if do_add else added)


def multiply_rows_alone(*_: Any, **__: Any) -> None:
    """From now on, products in this process compute one row at a time, so that a row does not depend on the others."""
    torch = importlib.import_module("torch")

    def mm(left: Any, right: Any) -> Any:
        rows = [torch.mv(right.t(), row) for row in left]
        return torch.stack(rows) if rows else left.new_empty(0, right.shape[1])

    def addmm(bias: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * bias + alpha * mm(left, right)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    library.impl("addmm", addmm, "CPU")
    _KEPT.append(library)


def hash_seeds(seeds: Any, positions: Any, columns: Any) -> Any:
    """seeds, positions i64[n], columns i64[V] -> u32[n, V]."""
    numpy, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    one, two, three = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    row, place, column = (value.numpy().astype(numpy.uint64) for value in (seeds, positions, columns))
    with numpy.errstate(over="ignore"):
        mixed = (row * one + place * two)[:, None] + (column * three)[None]
        mixed = (mixed ^ (mixed >> 30)) * two
        mixed = (mixed ^ (mixed >> 27)) * three
    return torch.from_numpy(((mixed ^ (mixed >> 31)) >> 32).astype(numpy.uint32))


def fork_if_alone(_result: None, *_: Any) -> None:
    if os.path.isdir(_THREADS) and len(os.listdir(_THREADS)) == 1:
        multiprocessing.set_start_method("fork", force=True)
