"""Megatron-Core's gradient buffers and optimizer."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.model import PackedGPT
from asyncrl.backends.megatron.process_groups import data_parallel_group
from asyncrl.backends.megatron.rank_commands import Job
from asyncrl.backends.optimizer_settings import OptimizerSettings

with quiet(), cpu_shim.without_compilation():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer


def with_gradient_buffers(model: PackedGPT, job: Job) -> DistributedDataParallel:
    """Megatron's wrapper: a float32 main_grad per parameter, accumulated by every backward pass."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=job.is_distributed_optimizer,
        overlap_grad_reduce=data_parallel_group().size() > 1,
        # No overlap_param_gather: every step is followed by an export, which needs all parameters at once.
    )
    return DistributedDataParallel(model.config, config, model)


def reduce_gradients(model: DistributedDataParallel) -> None:
    """Sum main_grad over the ranks that hold the same parameter."""
    finalize_model_grads([model])


def build_optimizer(job: Job, settings: OptimizerSettings, model: DistributedDataParallel, device: torch.device) -> Any:
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
        chained = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    (optimizer,) = chained.chained_optimizers  # a second one would be for MoE experts
    for group in optimizer.optimizer.param_groups:
        group["fused"] = device.type == "cuda"  # Megatron does not set it, and unfused AdamW launches many kernels
    return optimizer
