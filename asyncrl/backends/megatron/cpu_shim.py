"""Lets megatron-core 0.16 to 0.19 train on a CPU. On CUDA nothing is replaced.

Computations are unchanged, and all other code sees the original torch. Only Megatron's modules get a ``torch`` in which
the names below use the CPU as the device. Comments name the file in megatron/core that needs each name.
Tests: test_cpu_shim_does_not_change_torch, test_cpu_shim_gives_megatron_the_cpu.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CPU = torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Make Megatron's imported modules run on ``device`` by giving them the CPU torch, or the real torch."""
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.core")]
    wanted = torch if device.type == "cuda" else _torch_without_cuda()
    for module in modules:
        if getattr(module, "torch", None) is torch or isinstance(getattr(module, "torch", None), _Namespace):
            module.torch = wanted  # type: ignore[attr-defined]
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    original = getattr(random._set_cuda_rng_state, "__wrapped__", random._set_cuda_rng_state)
    random._set_cuda_rng_state = original if device.type == "cuda" else _setting_the_cpu(original)
    dispatcher: Any = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    moving = dispatcher.maybe_move_tensor_to_cpu
    moving = getattr(moving, "__wrapped__", moving)
    dispatcher.maybe_move_tensor_to_cpu = moving if device.type == "cuda" else _as_numpy(moving)


def _as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the sizes of a token exchange to numpy. The original converts only tensors on a GPU."""

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else original(tensor, as_numpy, record_stream)

    return move


def _setting_the_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Replace the setter used by recomputation. The original queues states until CUDA is initialised: a leak on CPU."""

    @functools.wraps(original)
    def set_state(state: torch.Tensor, *_device: object, **_options: object) -> None:
        torch.set_rng_state(state)

    return set_state


class _Namespace:
    """A module with some names overridden."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _torch_without_cuda() -> _Namespace:
    cuda = _Namespace(
        torch.cuda,
        # distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py, tensor_parallel/layers.py allocate on it
        current_device=lambda: _CPU,
        # tensor_parallel/random.py keeps a generator state per region and swaps states around recomputation
        manual_seed=lambda seed: torch.default_generator.manual_seed(int(seed)),
        get_rng_state=_random_state,
        random=_Namespace(torch.cuda.random, get_rng_state=_random_state),
        # distributed/param_and_grad_buffer.py of 0.19 waits for streams even without overlap
        current_stream=_Stream,
        # transformer/moe/token_dispatcher.py copies the tokens per expert to the host on a stream of its own
        Stream=_Stream,
        stream=lambda stream: stream,
        # pipeline_parallel/p2p_communication.py waits for the lengths that it received
        synchronize=lambda: None,
    )
    # tensor_parallel/mappings.py exchanges tokens of ranks that share experts; gloo takes only shards of one size
    distributed = _Namespace(torch.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    # optimizer/{clip_grads,optimizer}.py hard-code device="cuda" for one-element tensors
    return _Namespace(
        torch, cuda=cuda, distributed=distributed, zeros=_on_the_cpu(torch.zeros), tensor=_on_the_cpu(torch.tensor)
    )


def _all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """Gather tensors whose first sizes differ."""
    longest = max(len(output) for output in outputs)
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, found in zip(outputs, gathered, strict=True):
        output.copy_(found[: len(output)])


def _reduce_scatter(output: torch.Tensor, shards: list[torch.Tensor], group: Any = None) -> None:
    """Add up shards whose first sizes differ; each rank gets its own."""
    sums = torch.cat(shards)
    torch.distributed.all_reduce(sums, group=group)
    output.copy_(torch.split(sums, [len(shard) for shard in shards])[torch.distributed.get_rank(group)])


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = _CPU
        return factory(*arguments, **options)

    return make


def _random_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


class _Stream:
    """A no-op stream that is also its own event."""

    def wait_stream(self, _other: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


@contextmanager
def cuda_type_names(device: torch.device) -> Iterator[None]:
    """Use around optimizer construction: optimizer/*.py sort parameters by names such as "torch.cuda.FloatTensor".

    Tensor.type is patched globally inside the context, but only callers in optimizer/ see the changed result.
    """
    if device.type == "cuda":
        yield
        return
    original = torch.Tensor.type

    @functools.wraps(original)
    def name_or_cast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        answer = original(tensor, *arguments, **options)
        asker = sys._getframe(1).f_code.co_filename
        if isinstance(answer, str) and "/megatron/core/optimizer/" in asker:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = name_or_cast  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


@contextmanager
def without_compilation() -> Iterator[None]:
    """Use around Megatron's imports: jit.py applies torch.compile to functions we never call, which takes 2 s."""
    original = torch.compile
    torch.compile = lambda model=None, **_options: model or (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
