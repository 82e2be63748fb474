"""One rank's part of training a model with Megatron: gradients of its shard of the batch, its part of the optimizer.

Gradients are the *sum* over data-parallel ranks and micro-batches of loss x weight, because the weights already include
the denominators of the whole batch. Metrics are reduced over the same ranks. The host does not synchronise with the
device between the first micro-batch and the gradient norm.
Tests: tests/contracts/test_backend.py (equal to the reference), tests/unit/backends/megatron/test_megatron.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.profiler import record_function

from asyncrl.backends import lora
from asyncrl.backends.megatron import optimizer, process_groups
from asyncrl.backends.megatron.background_save import STATE, RankState, SavedModel, random_states
from asyncrl.backends.megatron.forward_backward import forward_backward
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.load_balance import ExpertBalance
from asyncrl.backends.megatron.mixture import tallies
from asyncrl.backends.megatron.process_groups import all_reduce
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.backends.megatron.saved_weights import LocalParameter, SavedWeights, is_copy, read_into
from asyncrl.backends.micro_batches import RecordedTokens, response_rows
from asyncrl.backends.optimizer_settings import (
    NO_MOMENTS,
    OptimizerSettings,
    is_trainable,
    reshape_moments,
    step_metrics,
)
from asyncrl.backends.port import StepResult
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.objective import Objective
from asyncrl.policies.batching.packing import MicroBatch, empty
from asyncrl.policies.corrections import diagnostics
from asyncrl.tensors.torch_dist import Chunk

log = logging.getLogger("asyncrl.learner")

_MAIN: Final = "param."
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class TrainedModel(SavedWeights):
    """A loaded model with Megatron's gradient buffers and optimizer."""

    def __init__(self, name: str, job: Job, device: torch.device) -> None:
        super().__init__(name, job, device)
        assert self._model.objective is not None
        assert self._model.optimizer is not None
        self._name = name
        self._objective: Objective = self._model.objective
        self._settings: OptimizerSettings = self._model.optimizer
        self._data_parallel = process_groups.data_parallel_group()
        self._buffers = optimizer.with_gradient_buffers(self._stages, job)
        self._optimizers = optimizer.build_optimizers(job, self._settings, self._buffers, device)
        self._draft_coefficient = job.options.draft_coefficient if self._num_draft_layers else 0.0
        self._balance: ExpertBalance | None = None
        if self._is_policy:
            has_loss = job.options.aux_loss_coefficient > 0
            self._balance = ExpertBalance(tallies(self._stages), self._shape, has_loss=has_loss, device=device)
        self._base = lora.fingerprint(self._model) if dist.get_rank() == 0 else ""
        self.before_update: Callable[[], None] = lambda: None
        """Waits until weights and moments may change."""

    @property
    def adamws(self) -> list[torch.optim.Optimizer]:
        return [part.adamw for part in self._optimizers]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        for part in self._optimizers:
            if part.host is not None:
                continue  # what AdamW has is on the host
            yield from (one for group in part.adamw.param_groups for one in group["params"])
            for state in part.adamw.state.values():
                yield from (one for one in state.values() if isinstance(one, torch.Tensor) and one.ndim)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that every step overwrites before it reads them."""
        for part in self._optimizers:
            part.megatron.zero_grad()  # otherwise copies of the gradients stay in memory
        yield from optimizer.gradients_of(self._buffers)

    def step(self, share: Sequence[MicroBatch], *, batch_tokens: int, learning_rate: float) -> StepResult:
        """Run one optimizer step. All ranks see the same reduced loss and norm, so all of them update or all skip.

        batch_tokens: of all shares

        Raises BackendError for an error in the update, which may have changed some weights. Any error before it leaves
        the weights of a lone rank as they were, and several ranks at different places.
        """
        optimizer.begin_gradients(self._buffers)
        for part in self._optimizers:
            part.megatron.zero_grad()
        if self._balance:
            self._balance.reset()
        recorded, draft_loss = RecordedTokens(), torch.zeros((), dtype=torch.float64, device=self._device)
        # The last backward pass sums gradients over ranks. Only the last stage has metric sums.
        sums = forward_backward(
            self._stages,
            share or (empty(),),
            make_row=partial(self._trained_row, batch_tokens=batch_tokens),
            finish=partial(self._loss, recorded=recorded, draft_loss=draft_loss),
        )
        totals = sum(sums, start=self._objective.zero(self._device))
        with record_function("learner: reduce"):
            loss, grad_norm, *others = self._reduce(totals, draft_loss)
        is_skipped = not is_trainable(loss, grad_norm)
        began = time.perf_counter()
        if not is_skipped:
            learning_rate *= self._objective.learning_rate_share(totals)
            try:
                with record_function("learner: optimizer"):
                    self._update(grad_norm, learning_rate)
            except RuntimeError as error:  # AdamW's moments may not fit into memory
                raise BackendError(f"the optimizer's update failed: {error}") from error
        update_seconds = time.perf_counter() - began
        # Rank 0 reports what all have reduced. One rank of each copy of the model reports its recorded tokens.
        tokens = recorded.on_host() if self._rank in (0, *self._layout.output_ranks) else {}
        if self._rank:
            return StepResult(metrics={}, tokens=tokens)
        metrics = step_metrics(
            self._objective.metrics(totals),
            model=self._name,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            is_skipped=is_skipped,
        )
        return StepResult(metrics={**metrics, **self._policy_metrics(others, update_seconds)}, tokens=tokens)

    def _trained_row(self, micro_batch: MicroBatch, *, batch_tokens: int) -> RowPart:
        return self._row(
            micro_batch,
            response_rows(micro_batch),
            is_routed=self._is_policy,
            uses_routing=self._is_policy,
            batch_tokens=batch_tokens if self._balance else 0,  # only the policy has a load-balancing loss
        )

    def _loss(
        self, row: RowPart, hidden: torch.Tensor, *, recorded: RecordedTokens, draft_loss: torch.Tensor
    ) -> tuple[torch.Tensor, diagnostics.Sums]:
        """Return a micro-batch's loss and the sums for its metrics. Adds to ``recorded`` and ``draft_loss``."""
        if self._objective.needs_logits:
            outputs = self._stages[-1].with_logits(hidden, row, self._temperature)
        else:
            outputs = self._outputs(row, hidden)
        recorded.add(row.micro_batch, outputs)
        of_draft: torch.Tensor | float = 0.0
        if self._draft_coefficient:  # of rows without targets, too: ranks that share experts exchange tokens
            of_draft = self._stages[-1].draft_loss(hidden, row, row.row.loss_inputs(*outputs).loss_weights)
            draft_loss.add_(of_draft.detach())
            of_draft = self._draft_coefficient * of_draft
        if not len(row.row.rows):  # the buffers still expect gradients
            return outputs[0][:0].sum() + of_draft, self._objective.zero(self._device)
        has_values = self._model.head == "values"
        inputs = row.row.value_inputs(*outputs) if has_values else row.row.loss_inputs(*outputs)
        loss, sums = self._objective.objective(inputs)
        return loss + of_draft, sums

    def _reduce(self, totals: diagnostics.Sums, draft_loss: torch.Tensor) -> list[float]:
        """Reduce gradients and sums over the ranks. Returns loss, norm of the gradients, and what ``_policy_metrics``
        takes. Waits for the device."""
        optimizer.reduce_gradients(self._buffers)
        for group in (self._data_parallel, self._pipeline):  # only a last stage has nonzero sums
            all_reduce(totals.sums, group)
            all_reduce(totals.maxima, group, dist.ReduceOp.MAX)
        for part in self._optimizers:
            part.begin()
        if (scale := self._objective.gradient_scale(totals)) is not None:
            self._scale_gradients(scale)
        reduced = torch.stack([totals.sums[0].double(), self._grad_norm()])
        if self._balance:
            reduced = torch.cat([reduced, self._balance.summary()])
        if self._draft_coefficient:
            all_reduce(draft_loss, self._data_parallel)
            reduced = torch.cat([reduced, draft_loss[None]])
        numbers: list[float] = reduced.tolist()
        return numbers

    def _policy_metrics(self, reduced: list[float], update_seconds: float) -> dict[str, float]:
        """Return the metrics that only the policy has.  reduced: the balance of experts, then the loss of drafts"""
        metrics: dict[str, float] = {}
        if self._draft_coefficient:
            metrics["learner/draft_loss"] = reduced.pop()
        if self._balance:
            metrics |= self._balance.metrics(reduced)
        if self._is_policy and any(part.host for part in self._optimizers):
            metrics["learner/update_seconds"] = update_seconds
        if self._is_policy and self._device.type == "cuda":
            metrics["learner/memory_bytes"] = float(torch.cuda.max_memory_allocated())
        return metrics

    def _grad_norm(self) -> torch.Tensor:
        """Return the norm of all ranks' gradients, f64 scalar. Megatron's own synchronises once per parameter."""
        norms = [norm for part in self._optimizers for norm in part.norms(partial(self._counts, part))]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if norms:
            total = torch.stack(norms).double().square().sum()
        all_reduce(total, dist.group.WORLD)
        return total.sqrt()

    def _counts(self, part: optimizer.PartOptimizer, weight: Any) -> bool:
        """Return whether this rank counts the weight's gradient in the norm; other ranks may hold copies of it."""
        is_cut = part.is_of_experts or getattr(weight, "tensor_model_parallel", False)
        is_first_shard = is_cut or self._tensor_parallel.rank() == 0
        return is_first_shard and self._is_writer(part.replicas) and not is_copy(weight)

    def _scale_gradients(self, scale: float) -> None:
        for part in self._optimizers:
            part.scale_gradients(scale)

    def _update(self, grad_norm: float, learning_rate: float) -> None:
        self.finish_exports()
        self.before_update()
        settings = self._settings
        if grad_norm > settings.max_grad_norm:
            self._scale_gradients(settings.max_grad_norm / (grad_norm + 1e-6))
        for part in self._optimizers:
            for group in part.adamw.param_groups:
                group["lr"] = learning_rate
                group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # Megatron's scheduler's task
            part.update()

    def forget_moments(self) -> None:
        """See ResetsOptimizer."""
        for part in self._optimizers:
            part.forget_moments()

    def state_to_save(self, folder: Path) -> RankState:
        """Return what this rank writes to the checkpoint in ``folder``: views of tensors that the next step changes."""
        chunks, steps = list(random_states(dist.get_rank())), dict[str, float]()
        # Each key is written once: by one replica, or by all of them in pieces (distributed optimizer). A piece is a
        # range of the flattened parameter, and becomes one or more rectangles of the whole tensor.
        for held in self._local_parameters():
            if not held.is_written:
                continue
            key = held.place.key
            for piece in self._pieces(held):
                weights = {key: piece.weights} | (
                    {} if piece.main is piece.weights else {STATE + _MAIN + key: piece.main}
                )
                state = self._optimizer_of(held).adamw.state.get(piece.main, {})
                kinds = _MOMENTS if self._settings.is_saved else ()
                moments = {f"{STATE}{kind}.{key}": state[kind] for kind in kinds if kind in state}
                steps |= {key: float(state["step"])} if "step" in state else {}
                for name, values in (weights | moments).items():
                    for view, start in held.place.views(values.detach().reshape(-1), piece.start):
                        chunks.append(Chunk(key=name, whole=held.place.whole, start=start, data=view))
        return RankState(folder=folder, chunks=chunks, steps=steps, base=self._base)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Restore a checkpoint written by ranks in any layout. Raises CheckpointError, ConfigError."""
        self.finish_exports()
        saved = SavedModel(folder)
        self._require_no_more(saved)
        for held in self._local_parameters():
            key = held.place.key
            read_into(saved, key, held.place, held.parameter)
            if not held.parameter.requires_grad:
                continue  # it is restored, and has no moments
            main = STATE + _MAIN + key if STATE + _MAIN + key in saved else key
            for piece in self._pieces(held):
                read_into(saved, main, held.place, piece.main, start=piece.start)
                moments: dict[str, torch.Tensor] = {}
                if f"{STATE}{_MOMENTS[0]}.{key}" in saved:
                    moments = {kind: torch.zeros_like(piece.main) for kind in _MOMENTS}
                    for kind, values in moments.items():
                        read_into(saved, f"{STATE}{kind}.{key}", held.place, values, start=piece.start)
                    moments["step"] = torch.tensor(saved.steps[key])
                part = self._optimizer_of(held)
                part.adamw.state[piece.main] = reshape_moments(moments, piece.main)
                if part.moments is not None:
                    part.moments.store(piece.main)
        saved.restore_random_states(dist.get_rank())
        if saved.lacks_moments and self._rank == 0:
            log.warning(NO_MOMENTS, folder)

    def _optimizer_of(self, held: LocalParameter) -> optimizer.PartOptimizer:
        """Return the optimizer that updates the parameter."""
        return self._optimizers[-1 if held.is_of_experts else 0]

    def _pieces(self, held: LocalParameter) -> Iterator[_Piece]:
        """Yield the part of a parameter that this rank's optimizer updates, or all of a frozen one."""
        parameter = held.parameter
        if not parameter.requires_grad:
            yield _Piece(start=0, weights=parameter, main=parameter)
        elif (found := optimizer.own_part(self._optimizer_of(held).megatron, parameter)) is not None:
            main, place = found
            weights = main if self._dtype == torch.float32 else parameter.detach().view(-1)[place]
            yield _Piece(start=place.start, weights=weights, main=main)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A part of a parameter of this rank: its flattened elements from ``start`` on.

    main     the float32 tensor that the optimizer updates; also its key in the optimizer's state
    weights  these elements in the model's dtype; the same tensor in a float32 model
    """

    start: int
    weights: torch.Tensor
    main: torch.Tensor
