"""Pack trajectories into micro-batches: sequences concatenated in one row, without padding.

A micro-batch has N tokens of D sequences. The logprob of token n is stored at position n (it is computed from the
hidden state at n - 1), so every array below is aligned with ``tokens``, and position 0 of a sequence carries no loss.

Sequences that begin with the same tokens may share them (prefixes.py). A micro-batch still has every sequence whole:
what is per token stays per token of its sequence, and only the model computes shared tokens once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import likeliest
from asyncrl.messages.likeliest import Likeliest
from asyncrl.messages.routing import NO_EXPERTS, ExpertArray, unrouted_rows
from asyncrl.messages.support import WHOLE, Support, join
from asyncrl.policies.batching import prefixes
from asyncrl.policies.batching.images import NO_IMAGES, ImagePatches, PackedImages, pack_images, tokens_by_image

_NOTHING_SHARED: Final[NDArray[np.int32]] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """A trajectory that is ready to train: its prompt and response, and the per-token values that the loss needs.

    tokens             i32[T]   prompt, then response
    response_mask      bool[T]  True where the policy sampled the token and the token is trained
    behavior_logprobs  f32[T]   0 where the policy sampled nothing
    advantages         f32[T]   0 outside the mask
    loss_weights       f32[T]   the aggregation: the batch's loss is the sum of loss x weight over all its tokens
    staleness          i32[T]   learner's version - version that sampled the token; 0 where nothing was sampled
    experts            [T, layers, experts per token] that the engine chose (messages/routing.py); empty if unknown
    model_outputs      f32[T] each, by name: outputs of other models that are known before the step
                       ("teacher_logprobs" of a served teacher)
    support            tokens that each was sampled from (messages/support.py); empty: the whole vocabulary
    temperature        at which it was sampled; 0: rollout.temperature
    images             images that it shows, in order
    likeliest          tokens at each place, by name: "behavior_likeliest", "teacher_likeliest"; those that are known
    """

    tokens: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    staleness: NDArray[np.int32]
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)
    model_outputs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    support: Support = WHOLE
    temperature: float = 0.0
    images: tuple[ImagePatches, ...] = ()
    likeliest: Mapping[str, Likeliest] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences packed into one row of N tokens; fields as in TrainingSequence, concatenated.

    boundaries     i32[D+1]  sequence d is tokens[boundaries[d]:boundaries[d+1]]
    sequences      i64[D]    index of each sequence in the packed list; -1 for the filler of ``empty``
    model_outputs  f32[N] each, by name: per-token outputs of other models ("ref_logprobs", "teacher_logprobs",
                   "old_values", "returns"). Aligned like everything else: a value that belongs to choosing token n is
                   at n, so the old value of the state in which it was chosen is the critic's output at token n - 1
    experts        empty if no sequence has any
    temperatures   f32[N], 0 where it is rollout.temperature; empty if that is everywhere
    recorded       the ``sequences`` whose per-token results the step must report (StepResult.tokens)
    shared         i32[D]: sequence d begins with the first shared[d] tokens of sequence d - 1, which a backend may
                   compute once; empty if all are computed
    images         the row's images, and then its positions (images.py); NO_IMAGES in a row of text
    """

    tokens: NDArray[np.int32]
    boundaries: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    staleness: NDArray[np.int32]
    sequences: NDArray[np.int64]
    model_outputs: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    recorded: tuple[int, ...] = ()
    experts: ExpertArray = field(default_factory=lambda: NO_EXPERTS)
    support: Support = WHOLE
    temperatures: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    likeliest: Mapping[str, Likeliest] = field(default_factory=dict)
    shared: NDArray[np.int32] = field(default_factory=lambda: _NOTHING_SHARED)
    images: PackedImages = NO_IMAGES

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_computed(self) -> int:
        """Number of tokens without those that are shared with an earlier sequence."""
        return self.num_tokens - int(self.shared.sum())

    @property
    def is_filler(self) -> bool:
        """Whether it was made by ``empty``."""
        return not (self.sequences >= 0).any()

    @property
    def positions(self) -> NDArray[np.int32]:
        """i32[N]: index of each token in its sequence."""
        lengths = np.diff(self.boundaries)
        return (np.arange(self.num_tokens) - np.repeat(self.boundaries[:-1], lengths)).astype(np.int32)

    @property
    def is_decoded(self) -> NDArray[np.bool_]:
        """bool[N]: True if an engine computed the token by itself: it had sampled it, and sampled the next one from it.

        The others it reads many at once: prompts, results of tools, and the last token of an answer before these.
        """
        is_sampled = np.append(self.response_mask, False)
        is_sampled[self.boundaries] = False  # the first token of the next sequence is not the next token
        return np.asarray(self.response_mask & is_sampled[1:])

    @property
    def is_fresh(self) -> NDArray[np.bool_]:
        """bool[N]: True if the version being trained sampled every token of the sequence.

        A fresh token after stale tokens does not count: its keys and values in the engine's cache came from older
        weights.
        """
        oldest = np.maximum.reduceat(self.staleness, self.boundaries[:-1])
        return np.repeat(oldest == 0, np.diff(self.boundaries))


def pack_for_ranks(
    sequences: Sequence[TrainingSequence], *, ranks: int, max_tokens: int, shares_prefixes: bool = False
) -> list[list[MicroBatch]]:
    """Return few micro-batches of at most ``max_tokens`` for each data-parallel rank, all of about the same cost.

    A sequence longer than ``max_tokens`` gets its own micro-batch. The result depends only on the sequences and their
    order. Every rank gets the same number of micro-batches, so that ranks reach collective operations together; a rank
    with too few sequences gets empty micro-batches.

    shares_prefixes  shared tokens count once, if that costs the slowest rank less than computing every sequence whole
    """
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    outputs = _common_outputs(sequences)
    items = [_Item(members=(i,), size=n, cost=cost(n)) for i, n in enumerate(lengths.tolist())]
    chosen = _Plan.of(items, ranks=ranks, max_tokens=max_tokens, lengths=lengths, shared=np.zeros_like(lengths))
    order: Sequence[int] = range(len(sequences))
    if shares_prefixes:
        tokens = tokens_by_image([(one.tokens, one.images) for one in sequences])
        sorted_order, shared = prefixes.sort(tokens, _experts_of_each(sequences))
        plans = _sharing_plans(lengths[sorted_order], shared, ranks=ranks, max_tokens=max_tokens)
        best = min(plans, key=lambda plan: plan.cost)
        if best.cost < chosen.cost:
            chosen, order = best, sorted_order
    return [
        [
            _concatenate([sequences[order[m]] for m in row], [order[m] for m in row], shared=shared)
            if row
            else empty(outputs)
            for row, shared in share
        ]
        for share in chosen.shares
    ]


MiniBatches: TypeAlias = Sequence[Sequence[Sequence[MicroBatch]]]
"""``mini_batches[i][r]`` is the data of data-parallel rank r in the batch's optimizer step i."""


def pack_mini_batches(
    sequences: Sequence[TrainingSequence],
    *,
    sizes: Sequence[int],
    ranks: int,
    max_tokens: int,
    shares_prefixes: bool = False,
) -> MiniBatches:
    """Apply ``pack_for_ranks`` to each mini-batch in turn; mini-batch i has ``sizes[i]`` sequences.

    Sequences keep their index in the whole batch.
    """
    packed, begin = [], 0
    for size in sizes:
        made = pack_for_ranks(
            sequences[begin : begin + size], ranks=ranks, max_tokens=max_tokens, shares_prefixes=shares_prefixes
        )
        packed.append([[_numbered_from(begin, micro_batch) for micro_batch in share] for share in made])
        begin += size
    return packed


def _numbered_from(begin: int, micro_batch: MicroBatch) -> MicroBatch:
    if not begin:
        return micro_batch
    numbers = np.where(micro_batch.sequences < 0, micro_batch.sequences, micro_batch.sequences + begin)
    return replace(micro_batch, sequences=numbers)


def recording(mini_batches: MiniBatches, sequences: Collection[int]) -> MiniBatches:
    """Return the result of ``pack_mini_batches`` with ``sequences`` (indices in the batch) marked as recorded."""
    wanted = frozenset(sequences)

    def marked(micro_batch: MicroBatch) -> MicroBatch:
        found = tuple(number for number in micro_batch.sequences.tolist() if number in wanted)
        return replace(micro_batch, recorded=found) if found else micro_batch

    return [[[marked(micro_batch) for micro_batch in share] for share in mini_batch] for mini_batch in mini_batches]


ATTENTION_TOKENS: Final = 16_384
"""Length at which a sequence costs twice as much per token as a short one, because attention grows with the length.

It is (parameters multiplied with each token) / (layers x width of attention): 10k for a model of 0.6B parameters, 30k
for 1.7B, 58k for 7B. The arithmetic of attention is the slower of the two.
"""


def cost(length: int) -> float:
    """Return the time to train a sequence, in units of one token of a short sequence."""
    return length * (1 + length / ATTENTION_TOKENS)


COPY_COST: Final = 0.2
"""Cost of a token in a row that shares some, in units of ``cost``: every sequence has copies of its keys and values.

Of the rows in docs/results/**/prefixes.jsonl: 0.06 to 0.19 on a CPU core, 0.18 and 0.26 at 0.6B on an H200.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """Sequences that stay in one row, with the tokens of the row that they take, and their cost."""

    members: Sequence[int]
    size: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A way to pack.

    shares  the rows of each rank: numbers of sequences, rising, and how many tokens each shares with the one before it
    cost    of the rank whose rows cost the most
    """

    shares: list[list[tuple[list[int], NDArray[np.int32]]]]
    cost: float

    @classmethod
    def of(
        cls,
        items: Sequence[_Item],
        *,
        ranks: int,
        max_tokens: int,
        lengths: NDArray[np.int64],
        shared: NDArray[np.int64],
    ) -> _Plan:
        """Deal items to ranks, then to rows.  lengths, shared: of all sequences, in an order in which they may share"""
        dealt = _dealt(items, ranks)
        assert dealt is not None, "without a limit everything fits"
        count = max(len(_packed(share, max_tokens, at_least=0)) for share in dealt)
        packed = [_packed(share, max_tokens, at_least=count) for share in dealt]
        shares, costs = [], []
        for share in packed:
            rows = [sorted(member for item in row for member in item.members) for row in share]
            shares.append([(row, prefixes.shared_within(row, shared)) for row in rows])
            costs.append(sum(_row_cost(lengths[row], of_row) for row, of_row in shares[-1]))
        return cls(shares=shares, cost=max(costs))


def _row_cost(lengths: NDArray[np.int64], shared: NDArray[np.int32]) -> float:
    copied = COPY_COST * int(lengths.sum()) if shared.any() else 0.0
    return sum(map(cost, lengths.tolist())) - sum(map(cost, shared.tolist())) + copied


def _sharing_plans(
    lengths: NDArray[np.int64], shared: NDArray[np.int64], *, ranks: int, max_tokens: int
) -> Iterator[_Plan]:
    """Yield plans for sorted sequences. Smaller bundles share less, and can be dealt to several ranks more evenly."""
    for parts in (1,) if ranks == 1 else (1, 2, 4, 8):
        items = []
        for run in prefixes.bundles(lengths, shared, max_tokens=max(1, max_tokens // parts)):
            of_run = prefixes.shared_within(run, shared)
            own = lengths[run.start : run.stop]
            items.append(_Item(members=run, size=prefixes.size(own, of_run), cost=_row_cost(own, of_run)))
        yield _Plan.of(items, ranks=ranks, max_tokens=max_tokens, lengths=lengths, shared=shared)


def _packed(share: Sequence[_Item], max_tokens: int, *, at_least: int) -> list[list[_Item]]:
    """Split the items of ``share`` into at least ``at_least`` groups, as few as either way of dealing finds."""
    count = max(at_least, -(-sum(item.size for item in share) // max_tokens))
    while True:
        for is_even in (True, False):  # evenly if that fits; filling groups in order sometimes needs one group less
            groups = _dealt(share, count, max_tokens=max_tokens, is_even=is_even)
            if groups is not None:
                return groups
        count += 1


def _dealt(
    share: Iterable[_Item], count: int, *, max_tokens: float = math.inf, is_even: bool = True
) -> list[list[_Item]] | None:
    """Deal items, longest first, to the cheapest group with room, or to the first one; None if one does not fit."""
    groups: list[list[_Item]] = [[] for _ in range(count)]
    costs, room = [0.0] * count, [max_tokens] * count
    for item in sorted(share, key=lambda item: -item.size):
        open_groups = [g for g in range(count) if room[g] >= item.size or not groups[g]]
        if not open_groups:
            return None
        chosen = min(open_groups, key=costs.__getitem__) if is_even else open_groups[0]
        groups[chosen].append(item)
        costs[chosen] += item.cost
        room[chosen] -= item.size
    return groups


def empty(outputs: Collection[str] = ()) -> MicroBatch:
    """Return two tokens that train nothing; they keep a data-parallel rank in step when it has no sequences left.

    outputs  names in ``model_outputs`` of the micro-batches beside it
    """
    blank = TrainingSequence(
        tokens=np.zeros(2, np.int32),
        response_mask=np.zeros(2, np.bool_),
        behavior_logprobs=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32),
        loss_weights=np.zeros(2, np.float32),
        staleness=np.zeros(2, np.int32),
        model_outputs={name: np.zeros(2, np.float32) for name in outputs},
    )
    return _concatenate([blank], [-1])


def compute_all(micro_batch: MicroBatch) -> MicroBatch:
    """Return the same row, in which every sequence has all of its tokens computed."""
    return replace(micro_batch, shared=_NOTHING_SHARED) if len(micro_batch.shared) else micro_batch


def of_one_length(shares: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
    """Pad shares with empty micro-batches to one length: copies that share experts exchange tokens in every layer."""
    count = max(map(len, shares))
    return [[*share, *(empty() for _ in range(count - len(share)))] for share in shares]


def _concatenate(
    sequences: Sequence[TrainingSequence], indices: Sequence[int], *, shared: NDArray[np.int32] = _NOTHING_SHARED
) -> MicroBatch:
    lengths = [len(sequence) for sequence in sequences]
    per_token: dict[str, Any] = {name: np.concatenate([getattr(d, name) for d in sequences]) for name in _PER_TOKEN}
    return MicroBatch(
        boundaries=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        sequences=np.array(indices, np.int64),
        experts=_experts(sequences),
        model_outputs={
            name: np.concatenate([one.model_outputs[name] for one in sequences]) for name in _common_outputs(sequences)
        },
        support=join([(len(sequence), sequence.support) for sequence in sequences]),
        temperatures=_temperatures(sequences),
        likeliest=_likeliest(sequences),
        shared=shared if shared.any() else _NOTHING_SHARED,
        images=pack_images([(len(sequence), sequence.images) for sequence in sequences]),
        **per_token,
    )


def _common_outputs(sequences: Sequence[TrainingSequence]) -> list[str]:
    """Return the names that all sequences have in ``model_outputs``."""
    return sorted(set.intersection(*(set(one.model_outputs) for one in sequences))) if sequences else []


def _likeliest(sequences: Sequence[TrainingSequence]) -> dict[str, Likeliest]:
    """Return the likeliest tokens of the joined sequences, for every name that any of them has."""
    names = sorted(set[str]().union(*(one.likeliest for one in sequences)))
    return {
        name: likeliest.join([(len(one), one.likeliest.get(name, likeliest.NONE)) for one in sequences])
        for name in names
    }


def _temperatures(sequences: Sequence[TrainingSequence]) -> NDArray[np.float32]:
    own = np.array([sequence.temperature for sequence in sequences], np.float32)
    return np.repeat(own, [len(sequence) for sequence in sequences]) if own.any() else np.zeros(0, np.float32)


def _experts(sequences: Sequence[TrainingSequence]) -> ExpertArray:
    """Return [N, layers, experts per token]; sequences without experts are marked as unrouted."""
    each = _experts_of_each(sequences)
    return np.concatenate(each, dtype=each[0].dtype) if each and len(each[0]) else NO_EXPERTS


def _experts_of_each(sequences: Sequence[TrainingSequence]) -> list[ExpertArray]:
    """Return the experts of each sequence, all of one shape and type; all empty if none are known."""
    known = next((sequence.experts for sequence in sequences if len(sequence.experts)), NO_EXPERTS)
    if not len(known):
        return [NO_EXPERTS] * len(sequences)
    return [
        d.experts.astype(known.dtype, copy=False) if len(d.experts) else unrouted_rows(len(d), like=known)
        for d in sequences
    ]


_PER_TOKEN = ("tokens", "response_mask", "behavior_logprobs", "advantages", "loss_weights", "staleness")


def sequence_slices(micro_batch: MicroBatch) -> Iterator[slice]:
    """Yield the slice of each sequence in the micro-batch's arrays."""
    for start, end in zip(micro_batch.boundaries[:-1], micro_batch.boundaries[1:], strict=True):
        yield slice(int(start), int(end))
