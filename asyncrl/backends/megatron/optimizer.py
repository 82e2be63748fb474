"""Megatron-Core's gradient buffers and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.model import PackedGPT
from asyncrl.backends.megatron.process_groups import replicas_group
from asyncrl.backends.megatron.rank_commands import Job
from asyncrl.backends.optimizer_settings import OptimizerSettings

with quiet(), cpu_shim.without_compilation():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer


def with_gradient_buffers(stages: Sequence[PackedGPT], job: Job) -> list[DistributedDataParallel]:
    """Megatron's wrappers: a float32 main_grad per parameter, accumulated by every backward pass.

    The last backward pass of a schedule adds up what the ranks that hold the same parameters have.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=job.is_distributed_optimizer,
        overlap_grad_reduce=replicas_group().size() > 1,
        # No overlap_param_gather: every step is followed by an export, which needs all parameters at once.
    )
    made = [
        DistributedDataParallel(stage.config, config, stage, disable_bucketing=number > 0)
        for number, stage in enumerate(stages)
    ]
    waits = [buffers.no_sync for buffers in made]
    stages[0].config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return made


def reduce_gradients(buffers: Sequence[DistributedDataParallel]) -> None:
    """Sum main_grad over the ranks that hold the same parameter, or a copy of it."""
    finalize_model_grads(list(buffers))


def build_optimizer(
    job: Job, settings: OptimizerSettings, buffers: Sequence[DistributedDataParallel], device: torch.device
) -> Any:
    """Megatron's optimizer around torch's AdamW; the learning rate is set every step."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.max_grad_norm,
        bf16=job.torch_dtype == torch.bfloat16,
        params_dtype=job.torch_dtype,
        use_distributed_optimizer=job.is_distributed_optimizer,
    )
    with cpu_shim.cuda_type_names(device):
        chained = get_megatron_optimizer(config, list(buffers), use_gloo_process_groups=False)
    (optimizer,) = chained.chained_optimizers  # a second one would be for MoE experts
    for group in optimizer.optimizer.param_groups:
        group["fused"] = device.type == "cuda"  # Megatron does not set it, and unfused AdamW launches many kernels
    return optimizer
