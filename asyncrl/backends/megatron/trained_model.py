"""One rank's part of training a model with Megatron: gradients of its shard of the batch, its part of the optimizer.

Gradients are the *sum* over data-parallel ranks and micro-batches of loss x weight, because the weights already include
the whole batch's denominators; metrics are reduced over the same ranks. The host does not synchronise with the device
between the first micro-batch and the gradient norm.
Tests: tests/contracts/test_backend.py (equal to the reference), tests/unit/backends/megatron/test_megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from asyncrl.backends import micro_batches, optimizer_state
from asyncrl.backends.megatron import optimizer, process_groups
from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.loaded_model import LoadedModel
from asyncrl.backends.megatron.rank_commands import Job
from asyncrl.backends.micro_batches import RecordedTokens
from asyncrl.backends.models import POLICY
from asyncrl.backends.offload import HostMoments
from asyncrl.backends.optimizer_settings import OptimizerSettings, is_trainable, step_metrics
from asyncrl.errors import StepFailed
from asyncrl.policies.algorithms.objective import Objective
from asyncrl.policies.batching.packing import MicroBatch, empty
from asyncrl.policies.corrections import diagnostics
from asyncrl.protocols import StepResult


class TrainedModel(LoadedModel):
    """A loaded model with Megatron's gradient buffers and optimizer."""

    def __init__(self, name: str, job: Job, device: torch.device, agreement: Agreement) -> None:
        super().__init__(name, job, device, agreement)
        assert self._model.objective is not None
        assert self._model.optimizer is not None
        self._name = name
        self._objective: Objective = self._model.objective
        self._settings: OptimizerSettings = self._model.optimizer
        self._data_parallel = process_groups.data_parallel_group()
        self._is_distributed = job.is_distributed_optimizer
        self._buffers = optimizer.with_gradient_buffers(self._network, job)
        self._optimizer = optimizer.build_optimizer(job, self._settings, self._buffers, device)
        self._moments = HostMoments(self._optimizer.optimizer) if job.is_offloading else None

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float, is_rehearsal: bool = False) -> StepResult:
        """One optimizer step. All ranks see the same reduced loss and norm, so either all take it or all skip it.

        is_rehearsal: all but the update. Raises StepFailed on every rank if one copy of the model could not compute its
        share. What leaves ranks in different collectives is raised as it is, on the rank that it happened to.
        """
        self._buffers.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._recorded = RecordedTokens()
        totals, problem = self._accumulated(share or (empty(),))
        with record_function("learner: reduce"):
            optimizer.reduce_gradients(self._buffers)
            _reduce(totals.sums, self._data_parallel)
            _reduce(totals.maxima, self._data_parallel, dist.ReduceOp.MAX)
            self._optimizer.prepare_grads()
            if (scale := self._objective.gradient_scale(totals)) is not None:
                torch._foreach_mul_([w.grad for w in self._optimizer.get_parameters() if w.grad is not None], scale)
            failed = torch.tensor(float(problem is not None), dtype=torch.float64, device=self._device)
            _reduce(failed, dist.group.WORLD, dist.ReduceOp.MAX)
            loss, grad_norm, is_failed = torch.stack([totals.sums[0].double(), self._grad_norm(), failed]).tolist()
        if is_failed:
            raise StepFailed("" if problem is None else f"{type(problem).__name__}: {problem}") from problem
        is_skipped = not is_trainable(loss, grad_norm)
        if not is_skipped and not is_rehearsal:
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
        return StepResult(metrics=metrics, tokens=self._recorded.on_host())

    def _accumulated(self, share: Sequence[MicroBatch]) -> tuple[diagnostics.Sums, Exception | None]:
        """The gradients of all micro-batches in Megatron's buffers, summed over ranks as the last one's come.

        What goes wrong on this rank is returned: the others wait for it in their sums, so it takes part with nothing.
        It cannot, and raises, in the midst of the last backward pass of several data-parallel ranks, and when a
        tensor-parallel rank failed alone: its peers wait for it in the midst of a layer.
        """
        totals = self._objective.zero(self._device)
        problem: Exception | None = None
        try:
            with self._buffers.no_sync():
                for micro_batch in share[:-1]:
                    loss, sums = self._forward(micro_batch)
                    self._backward(loss)
                    totals = totals + sums
            loss, sums = self._forward(share[-1])
        except Exception as error:  # a kernel's, an assertion's, too little memory: whatever the data did
            if not self._agreement.all_failed():
                raise
            problem = error.with_traceback(None)  # its frames hold what it ran out of memory with
        if problem is not None:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            loss, sums = self._forward(empty())
        try:
            self._backward(loss)
        except Exception as error:
            if self._data_parallel.size() > 1 or not self._agreement.all_failed():
                raise
            problem = problem or error
        return totals + sums, problem

    def _forward(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, diagnostics.Sums]:
        """A micro-batch's loss and what its metrics are made from."""
        row = self._row(micro_batch, micro_batches.response_rows(micro_batch))
        with record_function("learner: forward"):
            outputs = self._outputs(row)
            self._recorded.note(micro_batch, outputs)
            if len(row.rows):
                loss, sums = self._objective.objective(self._inputs(row, outputs))
            else:  # nothing to learn, but the buffers expect a gradient of every parameter
                loss, sums = outputs[0][:0].sum(), self._objective.zero(self._device)
        return loss, sums

    def _backward(self, loss: torch.Tensor) -> None:
        """Add its gradients to Megatron's buffers."""
        with record_function("learner: backward"):
            loss.backward()  # type: ignore[no-untyped-call]

    def _grad_norm(self) -> torch.Tensor:
        """Norm of all ranks' gradients, f64 scalar. Megatron's own synchronises once per parameter."""
        is_first = self._tensor_parallel.rank() == 0  # counts the replicated parameters
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

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's file. Raises CheckpointError, on this rank alone."""
        pieces = self._pieces() if self._is_distributed or self._data_parallel.rank() == 0 else []
        optimizer_state.write_pieces(folder, pieces, self._optimizer.optimizer.state, rank=dist.get_rank())

    def write_index(self, folder: Path) -> None:
        """Complete the checkpoint, once every rank has written its file. Raises CheckpointError."""
        ranks, tensor_parallel = dist.get_world_size(), self._tensor_parallel.size()
        optimizer_state.write_index(folder, ranks=ranks, tensor_parallel=tensor_parallel)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Restore a checkpoint written by any number of ranks. Raises CheckpointError."""
        with optimizer_state.open_state(folder, tensor_parallel=self._tensor_parallel.size()) as saved:
            sizes, frozen = {}, set()
            for name, parameter in self._shards():
                sizes[name] = parameter.numel()
                frozen |= set() if parameter.requires_grad else {name}
                parameter.copy_(saved.value(name, parameter.numel()).view(parameter.shape))
            for piece in self._pieces():
                if piece.name in frozen:
                    continue  # its value is there, and it has no moments
                size = sizes[piece.name]
                own = slice(piece.start, piece.start + piece.value.numel())
                piece.value.copy_(saved.value(piece.name, size)[own].view(piece.value.shape))
                moments = saved.moments(piece.name, size, own)
                self._optimizer.optimizer.state[piece.value] = optimizer_state.shaped(moments, piece.value)
            saved.restore_random_states(dist.get_rank())

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters by their names in a checkpoint."""
        suffix = f"@{self._tensor_parallel.rank()}" if self._tensor_parallel.size() > 1 else ""
        return ((name + suffix, parameter) for name, parameter in self._parameters.items())

    def _pieces(self) -> Iterator[optimizer_state.Piece]:
        """What this rank's optimizer updates, and on one rank what is frozen, so that a checkpoint has every weight.
        main_param is Megatron's float32 copy of a 16-bit parameter."""
        for name, parameter in self._shards():
            if not parameter.requires_grad:
                if self._data_parallel.rank() == 0:
                    yield optimizer_state.Piece(name=name, start=0, value=parameter)
            elif not self._is_distributed:
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
