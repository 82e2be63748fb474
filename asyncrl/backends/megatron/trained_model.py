"""One rank's part of training a model with Megatron: gradients of its shard of the batch, its part of the optimizer.

Gradients are the *sum* over data-parallel ranks and micro-batches of loss x weight, because the weights already include
the whole batch's denominators; metrics are reduced over the same ranks. The host does not synchronise with the device
between the first micro-batch and the gradient norm.
Tests: tests/contracts/test_backend.py (equal to the reference), tests/unit/backends/megatron/test_megatron.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from asyncrl.backends.megatron.process_groups import expert_replicas_group
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
        self._optimizers = optimizer.build_optimizers(job, self._settings, self._buffers, device)
        self._moments = [HostMoments(part.adamw) for part in self._optimizers] if job.is_offloading else []

    def step(self, share: Sequence[MicroBatch], *, learning_rate: float, is_rehearsal: bool = False) -> StepResult:
        """One optimizer step. All ranks see the same reduced loss and norm, so either all take it or all skip it.

        is_rehearsal: all but the update. Raises StepFailed on every rank if one copy of the model could not compute its
        share. What leaves ranks in different collectives is raised as it is, on the rank that it happened to.
        """
        for buffers in self._buffers:
            buffers.zero_grad_buffer()
        for part in self._optimizers:
            part.megatron.zero_grad()
        self._recorded = RecordedTokens()
        totals, problem = self._accumulated(share or (empty(),))
        with record_function("learner: reduce"):
            optimizer.reduce_gradients(self._buffers)
            for group in (self._data_parallel, self._pipeline):  # only a last stage has any
                _reduce(totals.sums, group)
                _reduce(totals.maxima, group, dist.ReduceOp.MAX)
            for part in self._optimizers:
                part.megatron.prepare_grads()
            if (scale := self._objective.gradient_scale(totals)) is not None:
                self._scale_gradients(scale)
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
        counted = [weight.grad for part in self._optimizers for weight in part.weights if self._counts(weight, part)]
        gradients = [gradient for gradient in counted if gradient is not None]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            total = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        _reduce(total, dist.group.WORLD)
        return total.sqrt()

    def _counts(self, weight: Any, part: optimizer.PartOptimizer) -> bool:
        """Whether this rank counts the weight's gradient, of which others may have a copy."""
        is_cut = part.is_of_experts or getattr(weight, "tensor_model_parallel", False)
        is_first_shard = is_cut or self._tensor_parallel.rank() == 0
        return is_first_shard and self._is_writer(part.replicas) and not _is_copy(weight)

    def _is_writer(self, replicas: dist.ProcessGroup) -> bool:
        """Whether this rank speaks for what it holds of weights that all of ``replicas`` hold."""
        return self._is_distributed or replicas.rank() == 0

    def _scale_gradients(self, scale: float) -> None:
        for part in self._optimizers:
            torch._foreach_mul_([weight.grad for weight in part.weights if weight.grad is not None], scale)

    def _update(self, grad_norm: float, learning_rate: float) -> None:
        settings = self._settings
        if grad_norm > settings.max_grad_norm:
            self._scale_gradients(settings.max_grad_norm / (grad_norm + 1e-6))
        with ExitStack() as stack:
            for moments in self._moments:
                stack.enter_context(moments.on_device())
            for part in self._optimizers:
                for group in part.adamw.param_groups:
                    group["lr"] = learning_rate
                    group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # Megatron's scheduler's task
                part.megatron.step_with_ready_grads()

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's file. Raises CheckpointError, on this rank alone."""
        pieces = [piece for shard in self._shards() if shard.is_written for piece in self._pieces(shard)]
        state = {weight: moments for part in self._optimizers for weight, moments in part.adamw.state.items()}
        optimizer_state.write_pieces(folder, pieces, state, rank=dist.get_rank())

    def write_index(self, folder: Path) -> None:
        """Complete the checkpoint, once every rank has written its file. Raises CheckpointError."""
        ranks, tensor_parallel = dist.get_world_size(), self._tensor_parallel.size()
        optimizer_state.write_index(folder, ranks=ranks, tensor_parallel=tensor_parallel)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Restore a checkpoint written by any number of ranks. Raises CheckpointError."""
        with optimizer_state.open_state(folder, tensor_parallel=self._tensor_parallel.size()) as saved:
            for shard in self._shards():
                parameter, whole = shard.parameter, saved.value(shard.name, shard.size)
                parameter.copy_(whole[shard.start : shard.start + parameter.numel()].view(parameter.shape))
                if not parameter.requires_grad:
                    continue  # its value is there, and it has no moments
                for piece in self._pieces(shard):
                    own = slice(piece.start, piece.start + piece.value.numel())
                    piece.value.copy_(whole[own].view(piece.value.shape))
                    moments = saved.moments(shard.name, shard.size, own)
                    self._part(shard).adamw.state[piece.value] = optimizer_state.shaped(moments, piece.value)
            saved.restore_random_states(dist.get_rank())

    def _shards(self) -> Iterator[_Shard]:
        """This rank's parameters as a checkpoint has them."""
        suffix = f"@{self._tensor_parallel.rank()}" if self._tensor_parallel.size() > 1 else ""
        experts = self._stages[0].part.experts
        for name, parameter in self._parameters.items():
            is_of_experts = name in self._maps and self._maps[name].is_of_experts
            replicas = expert_replicas_group() if is_of_experts else self._replicas
            is_writer = self._is_writer(replicas) if parameter.requires_grad else replicas.rank() == 0
            start, size = 0, parameter.numel()
            if is_of_experts:  # by their place among all of the layer's
                one = size // len(experts)
                start, size = experts.start * one, one * self._layout.expert * len(experts)
            yield _Shard(
                name=name if is_of_experts else (_EMBEDDING if _is_copy(parameter) else name) + suffix,
                parameter=parameter,
                start=start,
                size=size,
                is_of_experts=is_of_experts,
                is_written=is_writer and not _is_copy(parameter),
            )

    def _part(self, shard: _Shard) -> optimizer.PartOptimizer:
        """Who updates it."""
        return self._optimizers[-1 if shard.is_of_experts else 0]

    def _pieces(self, shard: _Shard) -> Iterator[optimizer_state.Piece]:
        """What this rank's optimizer updates of a parameter, or all of a frozen one. main_param is Megatron's float32
        copy of a 16-bit parameter."""
        parameter, megatron = shard.parameter, self._part(shard).megatron
        if not parameter.requires_grad:
            yield optimizer_state.Piece(name=shard.name, start=shard.start, value=parameter)
        elif not self._is_distributed:
            value: Any = parameter if self._dtype == torch.float32 else parameter.main_param  # type: ignore[attr-defined]
            yield optimizer_state.Piece(name=shard.name, start=shard.start, value=value)
        elif parameter in megatron.model_param_group_index_map:
            group, index = megatron.model_param_group_index_map[parameter]
            value = megatron.optimizer.param_groups[group]["params"][index]
            start = shard.start + megatron._get_model_param_range_map(parameter)["param"].start
            yield optimizer_state.Piece(name=shard.name, start=start, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A parameter of this rank as a checkpoint has it: ``size`` numbers under one name, of which it is those from
    ``start`` on.

    is_written  whether this rank writes it, and no other that has the same one or the original
    """

    name: str
    parameter: torch.Tensor
    start: int
    size: int
    is_of_experts: bool
    is_written: bool


def _is_copy(weight: Any) -> bool:
    """Whether it is the output layer of a last stage, of which the first has the original."""
    return bool(getattr(weight, "shared", False))


def _reduce(values: torch.Tensor, group: dist.ProcessGroup | None, operation: Any = dist.ReduceOp.SUM) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
