"""Lets megatron-core 0.16 to 0.19 train on a machine without CUDA. With CUDA nothing is patched.

No maths is replaced: the pieces below answer "which device?" with the CPU, or make bookkeeping calls do nothing. They
change torch for the whole process, which is a learner's or a rank's. Each says what in megatron/core asks for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CPU = torch.device("cpu")


@contextmanager
def cpu_imports() -> Iterator[None]:
    """Everything of Megatron is imported inside this: torch is patched before, Megatron after."""
    if torch.cuda.is_available():
        yield
        return
    _answer_cpu_for_the_current_device()
    _use_the_cpu_generator()
    _build_cuda_tensors_on_the_cpu()
    _name_types_as_megatron_expects()
    _make_streams_do_nothing()
    _stand_in_for_triton_kernels()
    with _without_compilation():
        yield
    _use_the_cpu_generator_in_megatron()


def _answer_cpu_for_the_current_device() -> None:
    """Asked by distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py, tensor_parallel/layers.py."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]


def _use_the_cpu_generator() -> None:
    """tensor_parallel/random.py keeps a state per region and swaps it around recomputation."""
    torch.cuda.manual_seed = _seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _use_the_cpu_generator_in_megatron() -> None:
    """The setter of tensor_parallel/random.py reaches past torch.cuda into torch._C."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _build_cuda_tensors_on_the_cpu() -> None:
    """optimizer/{clip_grads,optimizer,grad_scaler}.py write device="cuda" for their one-element tensors."""
    for name in ("zeros", "ones", "empty", "full", "tensor"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = _CPU
        return factory(*arguments, **options)

    return make


def _name_types_as_megatron_expects() -> None:
    """optimizer/*.py sort parameters by names such as "torch.cuda.FloatTensor"; only they get that answer."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def name_or_cast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        answer = original(tensor, *arguments, **options)
        asker = sys._getframe(1).f_code.co_filename
        if isinstance(answer, str) and "/megatron/core/optimizer/" in asker:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = name_or_cast  # type: ignore[assignment]


class _Stream:
    """distributed/param_and_grad_buffer.py of 0.19 makes one, whether or not it overlaps anything."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        self.device = _CPU

    def wait_stream(self, _other: Any) -> None:
        pass


def _make_streams_do_nothing() -> None:
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]


def _stand_in_for_triton_kernels() -> None:
    """transformer/moe/ops/paged_stash.py of 0.19 imports triton unguarded; we train no experts."""
    if importlib.util.find_spec("triton") is None:
        name = "megatron.core.transformer.moe.ops.paged_stash"
        module: Any = types.ModuleType(name)
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules.setdefault(name, module)


@contextmanager
def _without_compilation() -> Iterator[None]:
    """jit.py decorates with torch.compile, whose import takes two seconds and whose kernels need a compiler."""
    original = torch.compile
    torch.compile = lambda model=None, **_options: model or (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
