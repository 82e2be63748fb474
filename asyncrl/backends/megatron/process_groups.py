"""Megatron-Core's process groups: which ranks hold which part of a model."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.overlapped_linear import Exchange, Window, find_window_problem
from asyncrl.backends.megatron.rank_group import RankInfo
from asyncrl.config.adapter import Layout

with quiet(), cpu_shim.without_compilation():
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


log = logging.getLogger("asyncrl.learner")

_exchange: Exchange | None = None


def join(info: RankInfo, layout: Layout, *, overlaps_tensor_parallel: bool = False) -> None:
    """Create Megatron's process groups.  overlaps_tensor_parallel: see Job"""
    global _exchange
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=info.timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)  # nothing draws from this generator, but recomputation needs it to exist
    if overlaps_tensor_parallel and layout.tensor > 1:
        _exchange = _make_exchange(tensor_parallel_group(), layout)


def leave() -> None:
    """Destroy Megatron's process groups. They are global, and a later rank in this process needs new ones."""
    global _exchange
    _exchange = None
    parallel_state.destroy_model_parallel()


def data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model and train different data."""
    return parallel_state.get_data_parallel_group()  # type: ignore[no-any-return]


def replicas_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model, whether they train different data or share rows."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)  # type: ignore[no-any-return]


def tensor_parallel_group() -> dist.ProcessGroup:
    """The ranks that share every layer."""
    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[no-any-return]


def exchange() -> Exchange | None:
    """How the ranks that share every layer exchange rows during products; None if only collectives can do it."""
    return _exchange


def free_exchange() -> None:
    """Free the memory of the exchange. It is allocated again when it is needed. Collective."""
    if _exchange is not None:
        _exchange.release()


def context_parallel_group() -> dist.ProcessGroup:
    """The ranks that share every packed row."""
    return parallel_state.get_context_parallel_group()  # type: ignore[no-any-return]


def shared_rows_group() -> dist.ProcessGroup:
    """The ranks that share every packed row in a mixture: context-parallel, and tensor-parallel by sequence."""
    return parallel_state.get_tensor_and_context_parallel_group()  # type: ignore[no-any-return]


def expert_replicas_group() -> dist.ProcessGroup:
    """The ranks that hold the same experts."""
    return parallel_state.get_expert_data_parallel_group()  # type: ignore[no-any-return]


def expert_parallel_group() -> dist.ProcessGroup:
    """The ranks that share the experts of a layer."""
    return parallel_state.get_expert_model_parallel_group()  # type: ignore[no-any-return]


def expert_tensor_parallel_group() -> dist.ProcessGroup:
    """The ranks that share every expert."""
    return parallel_state.get_expert_tensor_parallel_group()  # type: ignore[no-any-return]


def pipeline_group() -> dist.ProcessGroup:
    """The ranks that share the layers of one copy of the model."""
    return parallel_state.get_pipeline_model_parallel_group()  # type: ignore[no-any-return]


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM) -> None:
    """Reduce ``values`` over the group in place; nothing to do for a rank alone."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)


def _make_exchange(group: dist.ProcessGroup, layout: Layout) -> Exchange | None:
    """Return the exchange of the group, or None, with a warning if the ranks have sequence parallelism and GPUs."""
    if not layout.is_sequence_parallel or dist.get_backend(group) != "nccl":
        return None
    if reason := find_window_problem(group):
        log.warning("tensor-parallel ranks use collectives (learner.options.overlap_tensor_parallel): %s", reason)
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return Exchange(partial(Window, group), rank=group.rank(), size=group.size(), device=device)
