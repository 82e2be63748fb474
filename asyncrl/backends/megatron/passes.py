"""Runs micro-batches forward and backward through a rank's stages of a model, with Megatron's schedules.

Every rank of a copy of the model gets the same micro-batches and builds its part of their rows itself. Only hidden
states move between stages. A failed micro-batch must not keep a stage from its neighbours, which wait for it. So the
stage continues with an empty row. Later stages recognise this by the length of what they receive, and do the same. The
ranks exchange their errors when the passes are over.
Tests: tests/contracts/test_backend_failures.py, tests/unit/backends/megatron/test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import record_function

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.model import PackedGPT
from asyncrl.backends.megatron.process_groups import exchange, pipeline_group
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.policies.batching.packing import MicroBatch, empty

with quiet(), cpu_shim.without_compilation():
    from megatron.core.pipeline_parallel import get_forward_backward_func

T = TypeVar("T")
Finish = Callable[[RowPart, torch.Tensor], tuple[torch.Tensor, T]]
"""Called on the last stage with a row and its hidden states. Returns the loss for backward, and the result."""


class Passes(Generic[T]):
    """The passes of one batch.

    problem   first error on this rank, which all ranks that it meets in every layer share
    is_alone  an error occurred on this rank but not on those ranks, so they wait for it in a collective
    begun     micro-batches whose forward pass has begun
    where     the place that this rank has reached; the same on all ranks that it meets in every layer
    """

    def __init__(
        self,
        stages: Sequence[PackedGPT],
        agreement: Agreement,
        *,
        make_row: Callable[[MicroBatch], RowPart],
        finish: Finish[T],
    ) -> None:
        self._stages = list(stages)
        self._agreement = agreement
        self._make_row = make_row
        self._finish = finish
        self.problem: Exception | None = None
        self.is_alone = False
        self.begun = 0
        self._forwards = 0

    @property
    def where(self) -> str:
        exchanging = exchange()
        uses = exchanging.uses if exchanging else 0
        return f"after the beginning of {self._forwards} passes of {self.begun} micro-batches, at exchange {uses}"

    def run(self, share: Sequence[MicroBatch], *, is_scoring: bool = False) -> list[T]:
        """Return the results of the micro-batches that succeeded; only the last stage has any.

        is_scoring: run forward passes only. Raises errors of a backward pass, and errors on this rank alone.
        """
        is_interleaved = len(self._stages) > 1
        filling = -len(share) % pipeline_group().size() if is_interleaved else 0  # interleaving needs full rounds
        filled = [*share, *[empty()] * filling]
        rows = [iter(filled) for _ in self._stages]
        results = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=rows if is_interleaved else rows[0],
            model=self._stages if is_interleaved else self._stages[0],
            num_microbatches=len(filled),
            seq_length=1,  # unused, like micro_batch_size: lengths travel with the hidden states
            micro_batch_size=1,
            forward_only=is_scoring,
        )
        return [result for result in results[: len(share)] if result is not None]

    def _forward(self, rows: Iterator[MicroBatch], stage: PackedGPT) -> Any:
        """Megatron's forward step: returns this stage's hidden states, and a function for the last stage's loss."""
        micro_batch = next(rows)
        if stage is self._stages[0]:
            self.begun += 1
        self._forwards += 1
        with record_function("learner: forward"):
            row, hidden = self._passed(stage, micro_batch)
        return hidden, partial(self._finished, stage, row)

    def _passed(self, stage: PackedGPT, micro_batch: MicroBatch) -> tuple[RowPart, torch.Tensor]:
        if self.problem is None:
            try:
                row = self._make_row(micro_batch)
                if stage.has_input_for(row):
                    return row, stage(row)
            except Exception as error:  # a kernel error, an assertion, out of memory: anything the data may cause
                self._note(error, "in the layers")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        row = self._make_row(empty())
        stage.shorten_input(row)
        return row, stage(row)

    def _finished(self, stage: PackedGPT, row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, Any, T | None]:
        result: T | None = None
        try:
            with record_function("learner: loss"):
                loss, result = self._finish(row, hidden)
        except Exception as error:
            self._note(error, "in the loss")
            # The schedule needs a gradient of the hidden states, and gradient buffers need one of every parameter.
            loss = sum(tensor.flatten()[:0].sum() for tensor in (hidden, *stage.parameters()))
        return loss, torch.zeros((), dtype=torch.int), result

    def _note(self, error: Exception, part: str) -> None:
        """Keep the error for later if all peers failed at the same place; otherwise raise it."""
        if not self._agreement.all_failed(f"{part} {self.where}"):
            self.is_alone = True
            raise error
        self.problem = self.problem or error.with_traceback(None)  # its frames may hold the memory that ran out
