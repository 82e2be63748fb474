"""Megatron-Core's gradient buffers and optimizer, and AdamW's moments in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.model import PackedGPT
from asyncrl.backends.megatron.process_groups import expert_replicas_group, replicas_group
from asyncrl.backends.optimizer_settings import OptimizerSettings, has_weight_decay

with quiet(), cpu_shim.without_compilation():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

_MOMENTS: Final = {"exp_avg", "exp_avg_sq"}
_SPARED: Final = ParamKey(
    with_name_predicate=ParamWithNamePredicate(
        name="spared", fn=lambda weight, name: not has_weight_decay(name, ndim=weight.ndim)
    )
)
"""Selects the weights without weight decay. Megatron's own rule decays the biases of experts."""


def with_gradient_buffers(stages: Sequence[PackedGPT], job: Job) -> list[DistributedDataParallel]:
    """Wrap stages in Megatron's DistributedDataParallel, with a float32 main_grad per parameter.

    The first backward pass of a step overwrites main_grad; later ones add to it. Zeroing the buffers and adding to
    zeros would move 8 more bytes for each parameter, which is noticeable for mixtures. The last backward pass of a
    schedule sums the gradients of the ranks that hold the same parameters.
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
    for parameter in _parameters(made):
        parameter.register_post_accumulate_grad_hook(_overwrite_first)
    return made


def begin_gradients(buffers: Sequence[DistributedDataParallel]) -> None:
    """Prepare for the first backward pass of a step. Like Megatron's zero_grad_buffer, but without writing zeros."""
    for parameter in _parameters(buffers):
        parameter.awaits_first_gradient = True
    for wrapper in buffers:
        for group in (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups):
            group.reset()


def reduce_gradients(buffers: Sequence[DistributedDataParallel]) -> None:
    """Sum main_grad over the ranks that hold the same parameter, or a copy of it."""
    for parameter in _parameters(buffers):
        if (
            parameter.awaits_first_gradient
        ):  # no backward pass reached it; where ranks share gradients, Megatron raises an error
            parameter.main_grad.zero_()
    finalize_model_grads(list(buffers))


def _parameters(buffers: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    return (parameter for wrapper in buffers for parameter in wrapper.params_with_grad)


def _overwrite_first(parameter: Any) -> None:
    """Copy the first gradient. Runs before Megatron's hook, which adds the gradient unless told it was added."""
    parameter.grad_added_to_main_grad = parameter.awaits_first_gradient
    if parameter.awaits_first_gradient:
        parameter.main_grad.copy_(parameter.grad)
        parameter.awaits_first_gradient = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptimizer:
    """Megatron's optimizer for some of the weights, around torch's AdamW.

    replicas       the ranks that hold the same weights
    is_of_experts  whether these are experts that are distributed over ranks differently from other weights
    """

    megatron: Any
    replicas: dist.ProcessGroup
    is_of_experts: bool

    @property
    def adamw(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.megatron.optimizer
        return optimizer

    @property
    def weights(self) -> list[Any]:
        """The weights that this optimizer updates."""
        return list(self.megatron.get_parameters())


def build_optimizers(
    job: Job, settings: OptimizerSettings, buffers: Sequence[DistributedDataParallel], device: torch.device
) -> list[PartOptimizer]:
    """Build one optimizer, or two if experts are distributed differently, of weights that are trained.

    Every step sets the learning rate.
    """
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
        chained = get_megatron_optimizer(
            config,
            list(buffers),
            config_overrides={_SPARED: ParamGroupOverride(wd_mult=0.0)},
            use_gloo_process_groups=False,
        )
    parts = [
        PartOptimizer(
            megatron=optimizer,
            replicas=expert_replicas_group() if is_of_experts else replicas_group(),
            is_of_experts=is_of_experts,
        )
        for optimizer, is_of_experts in zip(chained.chained_optimizers, (False, True), strict=False)
        if optimizer.optimizer is not None  # else none of its weights is trained
    ]
    for part in parts:
        for group in part.adamw.param_groups:
            group["fused"] = device.type == "cuda"  # Megatron does not set it, and unfused AdamW launches many kernels
    return parts


class HostMoments:
    """Keeps the moments of one torch.optim.AdamW in host memory between steps: 8 bytes a parameter less on the device.

    A step copies them to the device and back, two transfers. The device needs this memory only after the backward pass,
    when activations have been freed. (Megatron's own offload runs AdamW on the CPU.) Synchronise with the device before
    reading them on the host.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the moments on the device inside the context, for an optimizer step."""
        for weight, state in self._optimizer.state.items():
            for kind in _MOMENTS & state.keys():
                state[kind] = state[kind].to(weight.device, non_blocking=True)
        yield
        self.move_to_host()

    def move_to_host(self) -> None:
        """Move the moments to the host, wherever they are: a checkpoint is restored on the device."""
        for weight, state in self._optimizer.state.items():
            for kind in _MOMENTS & state.keys():
                home = self._home(weight, kind, state[kind])
                state[kind] = home.copy_(state[kind], non_blocking=True)

    def _home(self, weight: torch.Tensor, kind: str, moment: torch.Tensor) -> torch.Tensor:
        """Return a pinned host buffer, which asynchronous copies need; allocated once."""
        if (weight, kind) not in self._homes:
            self._homes[weight, kind] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
        return self._homes[weight, kind]
