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
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.profiler import record_function

from asyncrl.backends import micro_batches, optimizer_state
from asyncrl.backends.megatron import optimizer, process_groups
from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.loaded_model import LoadedModel
from asyncrl.backends.megatron.passes import Passes
from asyncrl.backends.megatron.rank_commands import Job
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.backends.micro_batches import RecordedTokens
from asyncrl.backends.models import POLICY
from asyncrl.backends.offload import HostMoments
from asyncrl.backends.optimizer_settings import OptimizerSettings, is_trainable, step_metrics
from asyncrl.errors import StepFailed
from asyncrl.policies.algorithms.objective import Objective
from asyncrl.policies.batching.packing import MicroBatch, empty
from asyncrl.policies.corrections import diagnostics
from asyncrl.protocols import StepResult

_EMBEDDING: Final = "embedding.word_embeddings.weight"
"""What the output layer of a last stage is a copy of, when embeddings are tied."""


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
        self._replicas = process_groups.replicas_group()
        self._is_distributed = job.is_distributed_optimizer
        self._buffers = optimizer.with_gradient_buffers(self._stages, job)
        self._optimizer = optimizer.build_optimizer(job, self._settings, self._buffers, device)
        self._moments = HostMoments(self._optimizer.optimizer) if job.is_offloading else None

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float, is_rehearsal: bool = False) -> StepResult:
        """One optimizer step. All ranks see the same reduced loss and norm, so either all take it or all skip it.

        is_rehearsal: all but the update. Raises StepFailed on every rank if one copy of the model could not compute its
        share. What leaves ranks in different collectives is raised as it is, on the rank that it happened to.
        """
        for buffers in self._buffers:
            buffers.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._recorded = RecordedTokens()
        totals, problem = self._accumulated(share or (empty(),))
        with record_function("learner: reduce"):
            optimizer.reduce_gradients(self._buffers)
            for group in (self._data_parallel, self._pipeline):  # only a last stage has any
                _reduce(totals.sums, group)
                _reduce(totals.maxima, group, dist.ReduceOp.MAX)
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
        """The gradients of all micro-batches in Megatron's buffers, summed over ranks as the last one's come; the sums
        of the metrics on the last stage.

        What goes wrong on this rank is returned: the others wait for it in their sums, so it takes part with nothing.
        It cannot, and raises, when a rank that it meets in every layer did not fail, and in a backward pass that others
        wait for: another stage, or replicas in the last one.
        """
        passes = Passes(self._stages, self._agreement, make_row=self._trained_row, finish=self._loss)
        try:
            sums = passes.run(share)
        except Exception as error:
            is_awaited = self._pipeline.size() > 1 or (self._replicas.size() > 1 and passes.begun == len(share))
            if passes.is_alone or is_awaited or not self._agreement.all_failed():
                raise
            passes.problem, sums = error.with_traceback(None), []
            passes.run((empty(),))  # in which replicas add up their gradients
        return sum(sums, start=self._objective.zero(self._device)), passes.problem

    def _trained_row(self, micro_batch: MicroBatch) -> RowPart:
        return self._row(micro_batch, micro_batches.response_rows(micro_batch))

    def _loss(self, row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, diagnostics.Sums]:
        """A micro-batch's loss and what its metrics are made from."""
        outputs = self._outputs(row, hidden)
        self._recorded.note(row.micro_batch, outputs)
        if len(row.row.rows):
            return self._objective.objective(self._inputs(row, outputs))
        return outputs[0][:0].sum(), self._objective.zero(self._device)  # the buffers expect gradients all the same

    def _grad_norm(self) -> torch.Tensor:
        """Norm of all ranks' gradients, f64 scalar. Megatron's own synchronises once per parameter."""
        gradients = [weight.grad for weight in self._optimizer.get_parameters() if self._counts(weight)]
        gradients = [gradient for gradient in gradients if gradient is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            total = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        _reduce(total, dist.group.WORLD)
        return total.sqrt()

    def _counts(self, weight: Any) -> bool:
        """Whether this rank counts the weight's gradient, of which others may have a copy."""
        is_first_replica = self._is_distributed or self._replicas.rank() == 0
        is_first_shard = self._tensor_parallel.rank() == 0 or getattr(weight, "tensor_model_parallel", False)
        return is_first_replica and is_first_shard and not _is_copy(weight)

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
        is_writer = self._is_distributed or self._replicas.rank() == 0
        pieces = self._pieces(with_copies=False) if is_writer else []
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
        for name, parameter in self._parameters.items():
            yield (_EMBEDDING if _is_copy(parameter) else name) + suffix, parameter

    def _pieces(self, *, with_copies: bool = True) -> Iterator[optimizer_state.Piece]:
        """What this rank's optimizer updates, and on one rank what is frozen, so that a checkpoint has every weight.
        main_param is Megatron's float32 copy of a 16-bit parameter."""
        for name, parameter in self._shards():
            if _is_copy(parameter) and not with_copies:
                continue
            if not parameter.requires_grad:
                if self._replicas.rank() == 0:
                    yield optimizer_state.Piece(name=name, start=0, value=parameter)
            elif not self._is_distributed:
                value: Any = parameter if self._dtype == torch.float32 else parameter.main_param  # type: ignore[attr-defined]
                yield optimizer_state.Piece(name=name, start=0, value=value)
            elif parameter in self._optimizer.model_param_group_index_map:
                group, index = self._optimizer.model_param_group_index_map[parameter]
                value = self._optimizer.optimizer.param_groups[group]["params"][index]
                start = self._optimizer._get_model_param_range_map(parameter)["param"].start
                yield optimizer_state.Piece(name=name, start=start, value=value)


def _is_copy(weight: Any) -> bool:
    """Whether it is the output layer of a last stage, of which the first has the original."""
    return bool(getattr(weight, "shared", False))


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
