"""What every backend reads out of a micro-batch: rows that need a logprob, documents of similar length, loss inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.algorithms import LossInputs
from asyncrl.policies.packing import MicroBatch

LENGTH_RATIO = 0.75
"""A document shares a rectangle with another when it is at least this fraction of its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """A packed row of N tokens laid out as few rectangles, each a set of documents of similar length.

    Attention needs documents apart; one call per document is slow when there are many, one rectangle for all is large
    when lengths differ. A document fills a row of its rectangle from the left and its last token fills what remains:
    a causal model never lets a token see what stands right of it, so the filling changes nothing that is read back.

    indices  i64[documents, length] each: which token of the packed row stands there
    order    i64[N]: where each token of the packed row stands in the rectangles flattened end to end
    """

    indices: tuple[torch.Tensor, ...]
    order: torch.Tensor


def rectangles(boundaries: NDArray[np.int32]) -> Rectangles:
    """Documents by falling length, a new rectangle when they get shorter than LENGTH_RATIO of the first.  i32[D+1]"""
    lengths = np.diff(boundaries).astype(np.int64)
    groups: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable"):
        if not groups or lengths[document] < LENGTH_RATIO * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(int(document))
    indices: list[torch.Tensor] = []
    order = np.zeros(int(boundaries[-1]), np.int64)
    offset = 0
    for group in groups:
        columns = np.arange(lengths[group[0]])
        rows = boundaries[group].astype(np.int64)[:, None] + np.minimum(columns, lengths[group][:, None] - 1)
        is_token = columns < lengths[group][:, None]
        order[rows[is_token]] = offset + np.flatnonzero(is_token)
        offset += rows.size
        indices.append(torch.from_numpy(rows))
    return Rectangles(indices=tuple(indices), order=torch.from_numpy(order))


def response_rows(micro_batch: MicroBatch) -> NDArray[np.int64]:
    """i64[M]: tokens the policy sampled. The first token of a document has no logprob and is never one."""
    mask = np.array(micro_batch.response_mask)
    mask[micro_batch.boundaries[:-1]] = False
    return np.flatnonzero(mask)


def predicted_rows(micro_batch: MicroBatch) -> NDArray[np.int64]:
    """i64[N - D]: every token that has one before it in its document."""
    return np.flatnonzero(micro_batch.positions)


def tensor(array: NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    """A copy: arrays out of messages are read-only, and tensors do not know that."""
    return torch.from_numpy(np.array(array)).to(device)


def loss_inputs(
    micro_batch: MicroBatch, rows: NDArray[np.int64], *, logprobs: torch.Tensor, entropy: torch.Tensor
) -> LossInputs:
    """The response tokens' numbers beside their logprobs and entropy f32[M], on the same device."""
    device = logprobs.device
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        behavior_logprobs=tensor(micro_batch.behavior_logprobs[rows], device),
        advantages=tensor(micro_batch.advantages[rows], device),
        loss_weights=tensor(micro_batch.loss_weights[rows], device),
        is_fresh=tensor(micro_batch.is_fresh[rows], device),
    )
