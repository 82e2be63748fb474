"""A model that one rank of the Megatron learner trains: its share of a batch to gradients, its part of the optimizer.

Every rank does the same: gradients are the *sum* over data-parallel ranks and micro-batches of loss x weight, because
the weights already carry the whole batch's denominators; metrics are reduced over the same ranks. From the first
micro-batch to the gradients' norm the host never waits for the device.
Tests: tests/test_backend_contract.py (equal to the reference), tests/test_megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from asyncrl.backends import megatron_model, micro_batches, optimizer_state
from asyncrl.backends.followers import Job
from asyncrl.backends.megatron_loaded import LoadedModel
from asyncrl.backends.models import POLICY
from asyncrl.backends.offload import HostMoments
from asyncrl.backends.optimizer_settings import OptimizerSettings, is_trainable, step_metrics
from asyncrl.policies import diagnostics
from asyncrl.policies.objective import Objective
from asyncrl.policies.packing import MicroBatch, empty
from asyncrl.protocols import StepResult


class TrainedModel(LoadedModel):
    """A loaded model with Megatron's gradient buffers and optimizer."""

    def __init__(self, name: str, job: Job, device: torch.device) -> None:
        super().__init__(name, job, device)
        assert self._model.objective is not None
        assert self._model.optimizer is not None
        self._name = name
        self._objective: Objective = self._model.objective
        self._settings: OptimizerSettings = self._model.optimizer
        self._data_parallel = megatron_model.data_parallel_group()
        self._is_distributed = job.is_distributed_optimizer
        self._buffers = megatron_model.with_gradient_buffers(self._network, job)
        self._optimizer = megatron_model.build_optimizer(job, self._settings, self._buffers, device)
        self._moments = HostMoments(self._optimizer.optimizer) if job.is_offloading else None

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float) -> StepResult:
        """One optimizer step; ranks meet in the sums of gradients and metrics, so all take it or all skip it."""
        self._buffers.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals = self._objective.zero(self._device)
        share = share or (empty(),)
        with self._buffers.no_sync():
            for micro_batch in share[:-1]:
                totals = totals + self._accumulate(micro_batch)
        totals = totals + self._accumulate(share[-1])  # gradients are summed over ranks as they come
        with record_function("learner: reduce"):
            megatron_model.reduce_gradients(self._buffers)
            _reduce(totals.sums, self._data_parallel)
            _reduce(totals.maxima, self._data_parallel, dist.ReduceOp.MAX)
            self._optimizer.prepare_grads()
            if (scale := self._objective.gradient_scale(totals)) is not None:
                torch._foreach_mul_([w.grad for w in self._optimizer.get_parameters() if w.grad is not None], scale)
            loss, grad_norm = torch.stack([totals.sums[0], self._grad_norm()]).tolist()
        is_skipped = not is_trainable(loss, grad_norm)
        if not is_skipped:
            learning_rate *= self._objective.learning_rate_share(totals)
            with record_function("learner: optimizer"):
                self._update(grad_norm, learning_rate)
        metrics = step_metrics(
            self._objective.metrics(totals),
            model=self._name,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            is_skipped=is_skipped,
        )
        if self._device.type == "cuda" and self._name == POLICY:
            metrics = {**metrics, "learner/memory_bytes": float(torch.cuda.max_memory_allocated())}
        return StepResult(metrics=metrics)

    def _accumulate(self, micro_batch: MicroBatch) -> diagnostics.Sums:
        """Add a micro-batch's gradients to Megatron's buffers."""
        row = self._row(micro_batch, micro_batches.response_rows(micro_batch))
        with record_function("learner: forward"):
            outputs = self._outputs(row)
            if len(row.rows):
                loss, sums = self._objective.objective(self._inputs(row, outputs))
            else:  # nothing to learn; the buffers count on a gradient of every parameter all the same
                loss, sums = outputs[0][:0].sum(), self._objective.zero(self._device)
        with record_function("learner: backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _grad_norm(self) -> torch.Tensor:
        """Of all gradients of all ranks, f64 scalar; Megatron's own asks the device once per parameter."""
        is_first = self._tensor_parallel.rank() == 0  # counts what all tensor-parallel ranks have
        weights = [
            w for w in self._optimizer.get_parameters() if is_first or getattr(w, "tensor_model_parallel", False)
        ]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            total = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        _reduce(total, dist.group.WORLD if self._is_distributed else self._tensor_parallel)
        return total.sqrt()

    def _update(self, grad_norm: float, learning_rate: float) -> None:
        settings = self._settings
        if grad_norm > settings.max_grad_norm:
            gradients = [weight.grad for weight in self._optimizer.get_parameters() if weight.grad is not None]
            torch._foreach_mul_(gradients, settings.max_grad_norm / (grad_norm + 1e-6))
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # Megatron leaves this to its scheduler
        with self._moments.on_device() if self._moments else nullcontext():
            self._optimizer.step_with_ready_grads()

    def save(self, folder: Path) -> None:
        """Write this rank's file; the index follows when every rank has written. Raises CheckpointError."""
        pieces = self._pieces() if self._is_distributed or self._data_parallel.rank() == 0 else []
        optimizer_state.write_pieces(folder, pieces, self._optimizer.optimizer.state, rank=dist.get_rank())
        dist.all_reduce(torch.zeros(1, device=self._device))
        if dist.get_rank() == 0:
            ranks, tensor_parallel = dist.get_world_size(), self._tensor_parallel.size()
            optimizer_state.write_index(folder, ranks=ranks, tensor_parallel=tensor_parallel)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Read what any number of ranks wrote. Raises CheckpointError."""
        with optimizer_state.open_state(folder, tensor_parallel=self._tensor_parallel.size()) as saved:
            sizes = {}
            for name, parameter in self._shards():
                sizes[name] = parameter.numel()
                parameter.copy_(saved.value(name, parameter.numel()).view(parameter.shape))
            for piece in self._pieces():
                size = sizes[piece.name]
                own = slice(piece.start, piece.start + piece.value.numel())
                piece.value.copy_(saved.value(piece.name, size)[own].view(piece.value.shape))
                moments = saved.moments(piece.name, size, own)
                self._optimizer.optimizer.state[piece.value] = optimizer_state.shaped(moments, piece.value)
            saved.restore_random_states(dist.get_rank())

    def _shards(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by the names they have in a checkpoint."""
        suffix = f"@{self._tensor_parallel.rank()}" if self._tensor_parallel.size() > 1 else ""
        return ((name + suffix, parameter) for name, parameter in self._parameters.items())

    def _pieces(self) -> Iterator[optimizer_state.Piece]:
        """What this rank's optimizer updates. Megatron keeps the float32 copy of a 16-bit parameter as main_param."""
        for name, parameter in self._shards():
            if not self._is_distributed:
                value: Any = parameter if self._dtype == torch.float32 else parameter.main_param  # type: ignore[attr-defined]
                yield optimizer_state.Piece(name=name, start=0, value=value)
            elif parameter in self._optimizer.model_param_group_index_map:
                group, index = self._optimizer.model_param_group_index_map[parameter]
                value = self._optimizer.optimizer.param_groups[group]["params"][index]
                start = self._optimizer._get_model_param_range_map(parameter)["param"].start
                yield optimizer_state.Piece(name=name, start=start, value=value)


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
