"""Micro-batches of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks


def pack(sequences: Sequence[TrainingSequence], *, max_tokens: int) -> list[MicroBatch]:
    (micro_batches,) = pack_for_ranks(sequences, ranks=1, max_tokens=max_tokens)
    return micro_batches
