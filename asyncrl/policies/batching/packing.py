"""Trajectories to packed micro-batches: documents end to end in one row, no padding.

N tokens of D documents in a micro-batch. The logprob of token n belongs to position n (it is computed from the hidden
state at n - 1), so every array below is aligned with ``tokens`` and position 0 of a document carries no loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, unrouted_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One trajectory ready to train: its prompt and response, and one number per token for all the loss needs.

    tokens             i32[T]   prompt, then response
    response_mask      bool[T]  True where the policy sampled the token, and it is trained
    behavior_logprobs  f32[T]   0 where it sampled nothing
    advantages         f32[T]   0 outside the mask
    loss_weights       f32[T]   the aggregation: the batch's loss is the sum of loss x weight over all its tokens
    staleness          i32[T]   learner's version - version that sampled the token; 0 where it sampled nothing
    experts            [T, layers, experts per token] that the engine chose (messages/routing.py); empty: not known
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    staleness: NDArray[np.int32]
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Documents packed into one row of N tokens; fields as in Document, concatenated.

    boundaries  i32[D+1]  document d is tokens[boundaries[d]:boundaries[d+1]]
    documents   i64[D]    where each stood in the list that was packed; -1 for what ``empty`` fills in
    scores      f32[N] each, by name: numbers of other models about each token ("ref_logprobs", "teacher_logprobs",
                "old_values", "returns"). Aligned as everything here: what belongs to choosing token n is at n, so the
                old value of the state in which it was chosen is the critic's at token n - 1.
    experts     empty where no document has any
    recorded    which of ``documents`` somebody will read: the step tells of their tokens (StepResult.tokens)
    """

    tokens: NDArray[np.int32]
    boundaries: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    staleness: NDArray[np.int32]
    documents: NDArray[np.int64]
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    recorded: tuple[int, ...] = ()
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)

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


def pack_for_ranks(documents: Sequence[Document], *, ranks: int, max_tokens: int) -> list[list[MicroBatch]]:
    """Per data-parallel rank few micro-batches of at most ``max_tokens``, all of about the same cost.

    A document longer than ``max_tokens`` gets a micro-batch of its own. The result depends only on the documents and
    their order. Every rank gets equally many, so that they reach what they do together at the same time: a rank with
    fewer documents than that gets empty ones.
    """
    lengths = [len(document) for document in documents]
    shares = _dealt(range(len(documents)), ranks, lengths)
    assert shares is not None, "without a limit everything fits"
    count = max(len(_packed(share, lengths, max_tokens, at_least=0)) for share in shares)
    return [
        [
            _concatenate([documents[i] for i in sorted(group)], sorted(group)) if group else empty()
            for group in _packed(share, lengths, max_tokens, at_least=count)
        ]
        for share in shares
    ]


def pack_parts(
    documents: Sequence[Document], *, parts: Sequence[int], ranks: int, max_tokens: int
) -> list[list[list[MicroBatch]]]:
    """What ``pack_for_ranks`` makes of each part of the batch, in order: ``parts[i]`` documents.

    A document's number is that in the batch.
    """
    packed, begin = [], 0
    for size in parts:
        made = pack_for_ranks(documents[begin : begin + size], ranks=ranks, max_tokens=max_tokens)
        packed.append([[_numbered_from(begin, micro_batch) for micro_batch in share] for share in made])
        begin += size
    return packed


def _numbered_from(begin: int, micro_batch: MicroBatch) -> MicroBatch:
    if not begin:
        return micro_batch
    numbers = np.where(micro_batch.documents < 0, micro_batch.documents, micro_batch.documents + begin)
    return replace(micro_batch, documents=numbers)


def recording(
    parts: Sequence[Sequence[Sequence[MicroBatch]]], documents: Collection[int]
) -> list[list[list[MicroBatch]]]:
    """What ``pack_parts`` made, with these documents of the batch recorded."""
    wanted = frozenset(documents)

    def marked(micro_batch: MicroBatch) -> MicroBatch:
        found = tuple(number for number in micro_batch.documents.tolist() if number in wanted)
        return replace(micro_batch, recorded=found) if found else micro_batch

    return [[[marked(micro_batch) for micro_batch in share] for share in part] for part in parts]


ATTENTION_TOKENS: Final = 16_384
"""A document so long costs twice as much per token as a short one: attention grows with the length, the rest does not.

The parameters that a token is multiplied with over layers x width of attention: 10k for a model of 0.6B parameters,
30k for 1.7B, 58k for 7B; attention's arithmetic is the slower one.
"""


def cost(length: int) -> float:
    """Time to train a document, in tokens of a short one."""
    return length * (1 + length / ATTENTION_TOKENS)


def _packed(share: Sequence[int], lengths: Sequence[int], max_tokens: int, *, at_least: int) -> list[list[int]]:
    """The documents of ``share`` in as few groups as the two ways of dealing find, ``at_least`` so many."""
    count = max(at_least, -(-sum(lengths[i] for i in share) // max_tokens))
    while True:
        for is_even in (True, False):  # evenly where it fits; filling one after the other sometimes needs one less
            groups = _dealt(share, count, lengths, max_tokens=max_tokens, is_even=is_even)
            if groups is not None:
                return groups
        count += 1


def _dealt(
    share: Iterable[int], count: int, lengths: Sequence[int], *, max_tokens: float = math.inf, is_even: bool = True
) -> list[list[int]] | None:
    """Documents, longest first, each to the group of least cost that has room, or to the first; None: no room."""
    groups: list[list[int]] = [[] for _ in range(count)]
    costs, room = [0.0] * count, [max_tokens] * count
    for index in sorted(share, key=lambda i: -lengths[i]):
        open_groups = [g for g in range(count) if room[g] >= lengths[index] or not groups[g]]
        if not open_groups:
            return None
        chosen = min(open_groups, key=costs.__getitem__) if is_even else open_groups[0]
        groups[chosen].append(index)
        costs[chosen] += cost(lengths[index])
        room[chosen] -= lengths[index]
    return groups


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
    return _concatenate([blank], [-1])


def _concatenate(documents: Sequence[Document], indices: Sequence[int]) -> MicroBatch:
    lengths = [len(document) for document in documents]
    per_token: dict[str, Any] = {name: np.concatenate([getattr(d, name) for d in documents]) for name in _PER_TOKEN}
    return MicroBatch(
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        documents=np.array(indices, np.int64),
        experts=_experts(documents),
        **per_token,
    )


def _experts(documents: Sequence[Document]) -> ExpertArray:
    """[N, layers, experts per token]; documents without any are unrouted."""
    known = next((document.experts for document in documents if len(document.experts)), None)
    if known is None:
        return NO_EXPERTS
    return np.concatenate(
        [d.experts if len(d.experts) else unrouted_rows(len(d), like=known) for d in documents], dtype=known.dtype
    )


_PER_TOKEN = ("tokens", "response_mask", "behavior_logprobs", "advantages", "loss_weights", "staleness")


def documents(micro_batch: MicroBatch) -> Iterator[slice]:
    """The slice of each document in the micro-batch's arrays."""
    for start, end in zip(micro_batch.boundaries[:-1], micro_batch.boundaries[1:], strict=True):
        yield slice(int(start), int(end))
