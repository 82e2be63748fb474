"""Megatron-Core's gradient buffers and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.host_update import HostUpdate, Shard, move_to_host
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.model import PackedGPT
from asyncrl.backends.megatron.process_groups import expert_replicas_group, replicas_group
from asyncrl.backends.megatron.stored_moments import StoredMoments
from asyncrl.backends.optimizer_settings import OptimizerSettings, has_weight_decay
from asyncrl.tensors.host_memory import HostMemory

with quiet(), cpu_shim.without_compilation():
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

_SPARED: Final = ParamKey(
    with_name_predicate=ParamWithNamePredicate(
        name="spared", fn=lambda weight, name: not has_weight_decay(name, ndim=weight.ndim)
    )
)
"""Selects the weights without weight decay. Megatron's own rule decays the biases of experts."""


def with_gradient_buffers(stages: Sequence[PackedGPT], job: Job) -> list[DistributedDataParallel]:
    """Wrap stages in Megatron's DistributedDataParallel, with a main_grad per parameter (gradients_dtype).

    The first backward pass of a step overwrites main_grad; later ones add to it. Zeroing the buffers and adding to
    zeros would move 8 more bytes for each parameter, which is noticeable for mixtures. The last backward pass of a
    schedule sums the gradients of the ranks that hold the same parameters.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=job.options.gradients_dtype == "float32",
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
        if parameter.awaits_first_gradient:  # no backward pass reached it; Megatron refuses that where ranks share it
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


def gradients_of(buffers: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield Megatron's buffers of gradients, which every step overwrites before it reads them."""
    for wrapper in buffers:
        yield from (buffer.grad_data for buffer in (*wrapper.buffers, *wrapper.expert_parallel_buffers))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptimizer:
    """Megatron's optimizer for some of the weights, around torch's AdamW.

    replicas       the ranks that hold the same weights
    is_of_experts  whether these are experts that are distributed over ranks differently from other weights
    gathered       Megatron's groups of buckets whose weights ranks exchange after an update on the host
    moments        how its moments are stored, if not by torch's AdamW itself
    host           runs AdamW on the host; None if it runs where the weights are
    """

    megatron: Any
    replicas: dist.ProcessGroup
    is_of_experts: bool
    gathered: Sequence[Any] = ()
    moments: StoredMoments | None = None
    host: HostUpdate | None = None

    @property
    def adamw(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.megatron.optimizer
        return optimizer

    @property
    def weights(self) -> list[Any]:
        """The weights that this optimizer updates."""
        return list(self.megatron.get_parameters())

    def begin(self) -> None:
        """Take over the gradients, which all ranks have summed."""
        if self.host is not None:
            self.host.begin()
        else:
            self.megatron.prepare_grads()

    def scale_gradients(self, factor: float) -> None:
        if self.host is not None:
            self.host.scale_gradients(factor)
        elif gradients := [weight.grad for weight in self.weights if weight.grad is not None]:  # else all are frozen
            torch._foreach_mul_(gradients, factor)

    def norms(self, counts: Callable[[Any], bool]) -> list[torch.Tensor]:
        """Return the norm of the gradient of each weight that ``counts``, scalars on the device."""
        if self.host is not None:
            return self.host.norms(counts)
        counted = [weight.grad for weight in self.weights if counts(weight)]
        gradients = [gradient for gradient in counted if gradient is not None]
        return list(torch._foreach_norm(gradients)) if gradients else []

    def update(self) -> None:
        """Update the weights from their gradients."""
        if self.host is not None:
            self.host.update()
            for group in self.gathered:
                group.start_param_sync()
            return
        with self.moments.updated() if self.moments is not None else nullcontext():
            self.megatron.step_with_ready_grads()

    def forget_moments(self) -> None:
        """Start the next update from moments of zero and a step count of 0."""
        self.adamw.state.clear()
        if self.moments is not None:
            self.moments.forget()


def own_part(megatron: Any, parameter: Any) -> tuple[torch.Tensor, slice] | None:
    """Return what AdamW updates of a trained parameter on this rank, and which of its flattened elements these are.

    None if other ranks update the parameter.  megatron: its optimizer
    """
    places = getattr(megatron, "model_param_group_index_map", None)
    if places is None:  # ranks do not share its state
        main = parameter if parameter.dtype == torch.float32 else parameter.main_param
        return main, slice(0, parameter.numel())
    if parameter not in places:
        return None
    group, index = places[parameter]
    where = megatron._get_model_param_range_map(parameter)["param"]
    return megatron.optimizer.param_groups[group]["params"][index], slice(where.start, where.end)


def _shards_of(megatron: Any, parameters: Iterable[Any]) -> list[Shard]:
    """Return the shards of ``parameters`` that a Megatron optimizer of 16-bit weights updates."""
    own = {id(main) for group in megatron.optimizer.param_groups for main in group["params"]}
    found = []
    for parameter in parameters:
        part = own_part(megatron, parameter)
        if part is not None and id(part[0]) in own:
            main, place = part
            weights, gradients = parameter.detach().view(-1)[place], parameter.main_grad.view(-1)[place]
            found.append(Shard(main=main, weights=weights, gradients=gradients))
    return found


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
    is_on_host = job.options.optimizer_device == "cpu"
    with cpu_shim.cuda_type_names(device), _without(buffers) if is_on_host else nullcontext():
        chained = get_megatron_optimizer(
            config,
            list(buffers),
            config_overrides={_SPARED: ParamGroupOverride(wd_mult=0.0)},
            use_gloo_process_groups=False,
        )
        for optimizer in chained.chained_optimizers if is_on_host else ():
            if optimizer.optimizer is not None:
                move_to_host(optimizer.optimizer)
    parts = [
        _part(optimizer, job, settings, buffers, device, is_of_experts=is_of_experts)
        for optimizer, is_of_experts in zip(chained.chained_optimizers, (False, True), strict=False)
        if optimizer.optimizer is not None  # else none of its weights is trained
    ]
    for part in parts:
        for group in part.adamw.param_groups:
            group["fused"] = device.type == "cuda"  # Megatron does not set it, and unfused AdamW launches many kernels
    return parts


@contextmanager
def _without(buffers: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Free the gradients' memory within the context: main weights are on the device until they are moved."""
    room = HostMemory(tuple, scratch=lambda: gradients_of(buffers))
    room.offload()
    yield
    room.onload()


def _part(
    megatron: Any,
    job: Job,
    settings: OptimizerSettings,
    buffers: Sequence[DistributedDataParallel],
    device: torch.device,
    *,
    is_of_experts: bool,
) -> PartOptimizer:
    made = PartOptimizer(
        megatron=megatron,
        replicas=expert_replicas_group() if is_of_experts else replicas_group(),
        is_of_experts=is_of_experts,
    )
    adamw = megatron.optimizer
    if job.options.optimizer_device != "cpu":
        return dataclasses.replace(made, moments=_stored_moments(adamw, job, settings, device))
    moments = _stored_moments(adamw, job, settings, torch.device("cpu"))
    groups = [
        group
        for wrapper in buffers
        for group in (wrapper.expert_parallel_bucket_groups if is_of_experts else wrapper.bucket_groups)
    ]
    return dataclasses.replace(
        made,
        gathered=groups if job.is_distributed_optimizer else (),
        moments=moments,
        host=HostUpdate(adamw, _shards_of(megatron, _parameters(buffers)), device, moments=moments),
    )


def _stored_moments(
    adamw: torch.optim.Optimizer, job: Job, settings: OptimizerSettings, device: torch.device
) -> StoredMoments | None:
    """Return how moments are stored; None if torch's AdamW keeps them where it runs, in float32.

    device: where it runs
    """
    options = job.options
    if not (options.offload_optimizer or options.moments_dtype != "float32" or settings.is_stateless):
        return None
    return StoredMoments(
        adamw,
        device,
        is_on_host=options.offload_optimizer,
        dtype=getattr(torch, options.moments_dtype),
        are_dropped=settings.is_stateless,
    )
