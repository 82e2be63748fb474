"""Megatron-Core's gradient buffers and optimizer, and how AdamW's moments are stored between updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
_PIECE_NUMBERS: Final = 2**26
"""Weights whose moments are brought to the device together: 512 MiB."""
_PIECES_AT_ONCE: Final = 2
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
    moments        how its moments are stored, if not by torch's AdamW itself
    """

    megatron: Any
    replicas: dist.ProcessGroup
    is_of_experts: bool
    moments: StoredMoments | None = None

    @property
    def adamw(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.megatron.optimizer
        return optimizer

    @property
    def weights(self) -> list[Any]:
        """The weights that this optimizer updates."""
        return list(self.megatron.get_parameters())

    def update(self) -> None:
        """Update the weights from their gradients."""
        with self.moments.updated() if self.moments is not None else nullcontext():
            self.megatron.step_with_ready_grads()

    def forget_moments(self) -> None:
        """Start the next update from moments of zero and a step count of 0."""
        self.adamw.state.clear()
        if self.moments is not None:
            self.moments.forget()


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
            moments=_stored_moments(optimizer.optimizer, job, settings, device),
        )
        for optimizer, is_of_experts in zip(chained.chained_optimizers, (False, True), strict=False)
        if optimizer.optimizer is not None  # else none of its weights is trained
    ]
    for part in parts:
        for group in part.adamw.param_groups:
            group["fused"] = device.type == "cuda"  # Megatron does not set it, and unfused AdamW launches many kernels
    return parts


def _stored_moments(
    adamw: torch.optim.Optimizer, job: Job, settings: OptimizerSettings, device: torch.device
) -> StoredMoments | None:
    """Return how moments are stored; None if torch's AdamW keeps them on the device in float32."""
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


class StoredMoments:
    """Stores the moments of one torch.optim.AdamW between updates: on the device or the host, in 32 or 16 bits, or not.

    Saves memory on the device at any time: 8 bytes a parameter in host memory or nowhere, 4 in bfloat16. An update
    brings the moments to the device in float32 piece by piece and back, so besides weights, gradients and main weights
    (10 bytes a parameter with 16-bit weights) it needs the moments of two pieces: one is updated or returns while the
    next one arrives. AdamW computes each element on its own, so pieces change no bit.

    device        of the weights
    is_on_host    whether the stored moments are in host memory
    dtype         of the stored moments. bfloat16 rounds them after every update, as Megatron's precision-aware
                  optimizer with --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16, which needs Transformer Engine
    are_dropped   nothing is stored: every update starts from moments of zero, as slime's --use-stateless-adam

    (Megatron's own offload runs AdamW on the CPU.)
    Tests: test_offloaded_moments_do_not_change_training, test_moments_in_bfloat16_are_rounded_between_updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        is_on_host: bool = True,
        dtype: torch.dtype = torch.float32,
        are_dropped: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._is_on_host = is_on_host
        self._dtype = dtype
        self._are_dropped = are_dropped
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._arriving, self._returning = _side_stream(device), _side_stream(device)

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Run the optimizer's step; inside the context it has no weights, so Megatron's own step leaves them as is."""
        on_device: deque[_Piece] = deque()
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for number, group in enumerate(groups):
                for weights in _pieces(whole[number]):
                    if len(on_device) == _PIECES_AT_ONCE:
                        on_device.popleft().wait()
                    self._fetch(weights)
                    for other in groups:
                        other["params"] = weights if other is group else []
                    self._optimizer.step()
                    on_device.append(self._return(weights))
            while on_device:
                on_device.popleft().wait()
            for group in groups:
                group["params"] = []
            yield
        finally:
            for group, weights in zip(groups, whole, strict=True):
                group["params"] = weights

    def store(self, weight: torch.Tensor) -> None:
        """Store the moments of one weight: a checkpoint is restored on the device."""
        self._return([weight]).wait()

    def forget(self) -> None:
        """Free what is stored: the next update starts from moments of zero."""
        self._homes.clear()

    def _fetch(self, weights: Sequence[torch.Tensor]) -> None:
        """Replace moments by copies on the device. They have none before their first step."""
        with _on(self._arriving):
            for weight, kind, moment in self._moments(weights):
                arrived = moment.to(weight.device, torch.float32, non_blocking=True, copy=True)
                self._optimizer.state[weight][kind] = arrived
        if self._arriving is not None:
            torch.cuda.current_stream().wait_stream(self._arriving)

    def _return(self, weights: Sequence[torch.Tensor]) -> _Piece:
        """Begin to store moments; the optimizer's state has the stored ones from now on."""
        moments = []
        if self._returning is not None:
            self._returning.wait_stream(torch.cuda.current_stream())
        with _on(self._returning):
            for weight, kind, moment in self._moments(weights):
                if not self._are_dropped:
                    home = self._home(weight, kind, moment)
                    self._optimizer.state[weight][kind] = home.copy_(moment, non_blocking=True)
                moments.append(moment)
            done = None if self._returning is None else self._returning.record_event()
        if self._are_dropped:
            for weight in weights:
                self._optimizer.state.pop(weight, None)
        return _Piece(moments=moments, done=done)

    def _moments(self, weights: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        for weight in weights:
            state = self._optimizer.state.get(weight, {})
            yield from [(weight, kind, state[kind]) for kind in sorted(_MOMENTS & state.keys())]

    def _home(self, weight: torch.Tensor, kind: str, moment: torch.Tensor) -> torch.Tensor:
        """Return the buffer that stores a moment, allocated once; on the host pinned, as asynchronous copies need."""
        if (weight, kind) not in self._homes:
            device = "cpu" if self._is_on_host else moment.device
            is_pinned = self._is_on_host and moment.is_cuda
            self._homes[weight, kind] = torch.empty(
                moment.shape, dtype=self._dtype, device=device, pin_memory=is_pinned
            )
        return self._homes[weight, kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Moments on the device that are being stored, until the event ``done``."""

    moments: Sequence[torch.Tensor]
    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the moments are stored. The device's memory may be used again afterwards, not before."""
        if self.done is not None:
            self.done.synchronize()


def _pieces(weights: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split weights into pieces of about _PIECE_NUMBERS numbers; a larger weight is a piece of its own."""
    piece: list[torch.Tensor] = []
    for weight in weights:
        if piece and sum(one.numel() for one in piece) + weight.numel() > _PIECE_NUMBERS:
            yield piece
            piece = []
        piece.append(weight)
    if piece:
        yield piece


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
