"""Runs micro-batches forward and backward through a rank's stages of a model, with Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.model import PackedGPT
from asyncrl.backends.megatron.process_groups import pipeline_group
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.policies.batching.packing import MicroBatch, empty

with quiet(), cpu_shim.without_compilation():
    from megatron.core.pipeline_parallel import get_forward_backward_func

T = TypeVar("T")


def forward_backward(
    stages: Sequence[PackedGPT],
    micro_batches: Sequence[MicroBatch],
    *,
    make_row: Callable[[MicroBatch], RowPart],
    finish: Callable[[RowPart, torch.Tensor], tuple[torch.Tensor, T]],
    is_forward_only: bool = False,
) -> list[T]:
    """Return the result of each micro-batch; only the last stage has any.

    Every rank of a copy of the model gets the same micro-batches and builds its part of their rows itself. Only hidden
    states move between stages. Any error leaves the ranks of a learner at different places.

    finish      called on the last stage with a row and its hidden states; returns the loss for backward, and a result
    is_forward_only  run forward passes only
    """

    def forward(rows: Iterator[MicroBatch], stage: PackedGPT) -> Any:
        """Megatron's forward step: returns this stage's hidden states, and a function for the last stage's loss."""
        row = make_row(next(rows))
        with record_function("learner: forward"):
            return stage(row), partial(loss, row)

    def loss(row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, T]:
        with record_function("learner: loss"):
            value, result = finish(row, hidden)
        return value, torch.zeros((), dtype=torch.int), result

    is_interleaved = len(stages) > 1
    # Interleaving needs full rounds: with 2 stages and 3 micro-batches, an empty one is added.
    filling = -len(micro_batches) % pipeline_group().size() if is_interleaved else 0
    filled = [*micro_batches, *[empty()] * filling]
    rows = [iter(filled) for _ in stages]
    results: list[T] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=rows if is_interleaved else rows[0],
        model=list(stages) if is_interleaved else stages[0],
        num_microbatches=len(filled),
        seq_length=1,  # unused, like micro_batch_size: lengths travel with the hidden states
        micro_batch_size=1,
        forward_only=is_forward_only,
    )
    return results[: len(micro_batches)]
