"""Trajectories to packed micro-batches: documents end to end in one row, no padding.

N tokens of D documents in a micro-batch. The logprob of token n belongs to position n (it is computed from the hidden
state at n - 1), so every array below is aligned with ``tokens`` and position 0 of a document carries no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One trajectory ready to train: its prompt and response, and one number per token for all the loss needs.

    tokens             i32[T]   prompt, then response
    response_mask      bool[T]  True where the policy sampled the token
    behavior_logprobs  f32[T]   0 outside the mask
    advantages         f32[T]   0 outside the mask
    loss_weights       f32[T]   the aggregation: the batch's loss is the sum of loss x weight over all its tokens
    staleness          i32[T]   learner's version - version that sampled the token; 0 outside the mask
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    staleness: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Documents packed into one row of N tokens; fields as in Document, concatenated.

    boundaries  i32[D+1]  document d is tokens[boundaries[d]:boundaries[d+1]]
    """

    tokens: NDArray[np.int32]
    boundaries: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    staleness: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> NDArray[np.int32]:
        """i32[N]: index of each token in its document."""
        lengths = np.diff(self.boundaries)
        return (np.arange(self.num_tokens) - np.repeat(self.boundaries[:-1], lengths)).astype(np.int32)

    @property
    def is_fresh(self) -> NDArray[np.bool_]:
        """bool[N]: the version being trained sampled every token of the document.

        A fresh token behind stale ones is not: its keys and values in the engine's cache came from older weights.
        """
        oldest = np.maximum.reduceat(self.staleness, self.boundaries[:-1])
        return np.repeat(oldest == 0, np.diff(self.boundaries))


def pack(documents: Sequence[Document], *, max_tokens: int) -> list[MicroBatch]:
    """Documents into as few micro-batches of at most ``max_tokens`` as first-fit decreasing finds.

    A document longer than ``max_tokens`` gets a micro-batch of its own. The result depends on the documents and their
    order alone.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(documents)), key=lambda i: -len(documents[i])):
        length = len(documents[index])
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(max_tokens - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return [_concatenate([documents[i] for i in sorted(members)]) for members in bins]


def pack_for_ranks(documents: Sequence[Document], *, ranks: int, max_tokens: int) -> list[list[MicroBatch]]:
    """One list of micro-batches per data-parallel rank, token counts balanced (longest document first).

    Every rank gets equally many micro-batches, because each takes part in every collective: short ranks get empty ones.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(documents)), key=lambda i: -len(documents[i])):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += len(documents[index])
    packed = [pack([documents[i] for i in sorted(share)], max_tokens=max_tokens) for share in shares]
    longest = max(len(share) for share in packed)
    return [share + [empty() for _ in range(longest - len(share))] for share in packed]


def empty() -> MicroBatch:
    """Two tokens that train nothing: keeps a data-parallel rank in step when it has no documents left."""
    blank = Document(
        tokens=np.zeros(2, np.int32),
        response_mask=np.zeros(2, np.bool_),
        behavior_logprobs=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32),
        loss_weights=np.zeros(2, np.float32),
        staleness=np.zeros(2, np.int32),
    )
    return _concatenate([blank])


def _concatenate(documents: Sequence[Document]) -> MicroBatch:
    lengths = [len(document) for document in documents]
    return MicroBatch(
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        **{name: np.concatenate([getattr(d, name) for d in documents]) for name in _PER_TOKEN},
    )


_PER_TOKEN = ("tokens", "response_mask", "behavior_logprobs", "advantages", "loss_weights", "staleness")


def documents(micro_batch: MicroBatch) -> Iterator[slice]:
    """The slice of each document in the micro-batch's arrays."""
    for start, end in zip(micro_batch.boundaries[:-1], micro_batch.boundaries[1:], strict=True):
        yield slice(int(start), int(end))
