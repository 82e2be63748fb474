"""How the ranks get their shares of a batch: each is encoded once, and passed on from rank to rank.

The ranks that train the same share on the same stage are neighbours. Rank 0 sends to the first of them, which passes
pieces on to two others while it receives the next ones, and so on. Where they are of several machines, a share enters
each of these once, and goes on from its first rank there. The experts of a token (routing replay) are most of its bytes
in a large mixture. They are not encoded but copied, in one or two bytes a choice, and a stage gets those of its own
layers. Two tensor- and two context-parallel ranks, two stages:

    0 -- share, experts of layers 0-23 --> 1, 2    1 --> 3
    0 -- share, experts of layers 24-47 -> 4       4 --> 5, 6    5 --> 7

Test: tests/unit/backends/megatron/test_feeding.py. Measured by benchmarks/feeding.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.megatron.job import Feed
from asyncrl.backends.megatron.rank_group import RankGroup
from asyncrl.config.adapter import Layout
from asyncrl.messages import codec
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.policies.batching.packing import MicroBatch

_PIECE_BYTES: Final = 2**24
"""What a rank has received before it passes it on."""
_SCRATCH_BYTES: Final = 2**19
"""Experts of a stage's layers that are copied together; they stay in a core's cache on their way into a piece."""
_AT_ONCE: Final = 4
"""Pieces that are made and sent at a time."""

Layers = tuple[int, ...] | None
"""Numbers of layers whose experts a stage needs; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of a batch as it is encoded.

    micro_batches  without experts
    choices        of each micro-batch: experts of a token in a layer, and bytes of each number; (0, 0): it has none
    """

    micro_batches: tuple[MicroBatch, ...]
    choices: tuple[tuple[int, int], ...]


class Shares:
    """The shares of a batch on rank 0."""

    def __init__(
        self,
        shares: Sequence[Sequence[MicroBatch]],
        layout: Layout,
        layers: Sequence[Layers],
        *,
        of_machine: int = 0,
    ) -> None:
        """
        layers      of each stage
        of_machine  neighbours that are on one machine; 0: all are
        """
        self._shares, self._layout, self._layers = shares, layout, layers
        self._of_machine = of_machine or layout.ranks
        self._encoded = [_encode(share) for share in shares] if layout.ranks > 1 else []

    @property
    def own(self) -> tuple[MicroBatch, ...]:
        """Return rank 0's."""
        layers = self._layers[0]
        return tuple(one if layers is None else _with_layers(one, layers) for one in self._shares[0])

    def feed(self, rank: int) -> Feed:
        """Return what follows a command to the rank."""
        layers = self._layers_of(rank)
        share = self._layout.share(rank)
        sizes = [math.prod(_shape(one, layers)) * one.experts.dtype.itemsize for one in self._shares[share]]
        return Feed(
            share_bytes=len(self._encoded[share]),
            expert_bytes=sum(sizes),
            layers=len(layers),
            of_machine=self._of_machine,
        )

    def send(self, group: RankGroup) -> None:
        """Send all shares. Blocks until the ranks have taken them. Raises RuntimeError if a rank is gone."""
        size = _block_size(self._layout)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="feeding") as threads:
            list(threads.map(lambda first: self._send(group, first), range(0, self._layout.ranks, size)))

    def _send(self, group: RankGroup, first: int) -> None:
        """Send what the block of ranks that begins with ``first`` needs."""
        receivers = [first] if first else receivers_of(self._layout, 0, of_machine=self._of_machine)
        for piece in self.pieces(first) if receivers else ():
            for finish in [group.begin_feed(torch.from_numpy(piece), rank) for rank in receivers]:
                finish()

    def pieces(self, rank: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes for a rank, its share and then the experts of its layers, in pieces as ``receive`` takes
        them. Each is valid until the next."""
        piece, filled = np.empty(min(_PIECE_BYTES, self.feed(rank).num_bytes), np.uint8), 0
        for part in self._parts(rank):
            start = 0
            while start < len(part):
                count = min(len(part) - start, len(piece) - filled)
                piece[filled : filled + count] = part[start : start + count]
                start, filled = start + count, filled + count
                if filled == len(piece):
                    yield piece
                    filled = 0
        if filled:
            yield piece[:filled]

    def _parts(self, rank: int) -> Iterator[NDArray[np.uint8]]:
        share, layers, feed = self._layout.share(rank), self._layers_of(rank), self.feed(rank)
        yield np.frombuffer(self._encoded[share], np.uint8)
        yield np.zeros(feed.experts_start - feed.share_bytes, np.uint8)
        for one in self._shares[share]:
            yield from (part.reshape(-1).view(np.uint8) for part in _cut_layers(one.experts, layers))

    def _layers_of(self, rank: int) -> Sequence[int]:
        layers = self._layers[self._layout.stage(rank)]
        if layers is not None:
            return layers
        return range(max((one.experts.shape[1] for share in self._shares for one in share), default=0))


def receive(group: RankGroup, feed: Feed, layout: Layout) -> tuple[MicroBatch, ...]:
    """Receive this rank's share and pass it on. Raises RuntimeError if a rank is gone."""
    rank, data = group.info.rank, torch.empty(feed.num_bytes, dtype=torch.uint8)
    sender = sender_of(layout, rank, of_machine=feed.of_machine)
    receivers, sending = receivers_of(layout, rank, of_machine=feed.of_machine), list[Callable[[], None]]()
    for piece in torch.split(data, _PIECE_BYTES):
        group.receive_feed(piece, sender)
        for finish in sending:
            finish()
        sending = [group.begin_feed(piece, receiver) for receiver in receivers]
    for finish in sending:
        finish()
    return unpack(data.numpy(), feed)


def unpack(data: NDArray[np.uint8], feed: Feed) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a payload; their experts are views of it."""
    share = codec.decode(data[: feed.share_bytes].data, Share)
    found, start = list[MicroBatch](), feed.experts_start
    for one, (choices, width) in zip(share.micro_batches, share.choices, strict=True):
        experts: NDArray[Any] = NO_EXPERTS
        if choices:
            stop = start + one.num_tokens * feed.layers * choices * width
            experts = data[start:stop].view(f"<u{width}").reshape(one.num_tokens, feed.layers, choices)
            start = stop
        found.append(dataclasses.replace(one, experts=experts))
    return tuple(found)


def sender_of(layout: Layout, rank: int, *, of_machine: int) -> int:
    """Return the rank that passes a share on to ``rank``. Each machine has ``of_machine`` ranks, numbered in a row."""
    machine, first = rank // of_machine, rank - rank % _block_size(layout)
    first_here = max(first, machine * of_machine)
    if rank > first_here:
        return first_here + (rank - first_here - 1) // 2
    if rank == first:
        return 0
    first_machine = first // of_machine
    return max(first, (first_machine + (machine - first_machine - 1) // 2) * of_machine)


def receivers_of(layout: Layout, rank: int, *, of_machine: int) -> list[int]:
    """Return the ranks to which ``rank`` passes its share on: at most two of its machine, and two of others."""
    first = rank - rank % _block_size(layout)
    others = range(first + 1, first + _block_size(layout))
    return [other for other in others if sender_of(layout, other, of_machine=of_machine) == rank]


def _block_size(layout: Layout) -> int:
    """Return how many neighbours train the same share on the same stage."""
    return layout.tensor * layout.context


def _encode(share: Sequence[MicroBatch]) -> bytes:
    choices = tuple((one.experts.shape[2], one.experts.dtype.itemsize) if len(one.experts) else (0, 0) for one in share)
    plain = tuple(dataclasses.replace(one, experts=NO_EXPERTS) for one in share)
    return codec.encode(Share(micro_batches=plain, choices=choices))


def _shape(one: MicroBatch, layers: Sequence[int]) -> tuple[int, int, int]:
    return (len(one.experts), len(layers), one.experts.shape[2]) if len(one.experts) else (0, 0, 0)


def _with_layers(one: MicroBatch, layers: Sequence[int]) -> MicroBatch:
    if len(layers) == one.experts.shape[1]:  # all of them; or it has no experts
        return one
    into = np.empty(_shape(one, layers), one.experts.dtype)
    _copy_layers(one.experts, layers, into=into)
    return dataclasses.replace(one, experts=into)


def _cut_layers(experts: NDArray[Any], layers: Sequence[int]) -> Iterator[NDArray[Any]]:
    """Yield the experts of some layers, [n, layers, k] for n tokens at a time. Each is valid until the next."""
    if len(layers) == experts.shape[1]:
        yield experts
        return
    of_token = len(layers) * experts.shape[2]
    at_once = min(len(experts), max(1, _SCRATCH_BYTES // max(1, of_token * experts.itemsize)))
    into = np.empty((at_once, len(layers), experts.shape[2]), experts.dtype)
    for start in range(0, len(experts), max(1, at_once)):
        some = experts[start : start + at_once]
        _copy_layers(some, layers, into=into[: len(some)])
        yield into[: len(some)]


def _copy_layers(experts: NDArray[Any], layers: Sequence[int], *, into: NDArray[Any]) -> None:
    """Copy [N, layers of the model, k] -> [N, layers of a stage, k]. Layers that follow one another go at once."""
    if len(experts):
        for at, run in _runs(layers):
            np.copyto(into[:, at : at + len(run)], experts[:, run.start : run.stop])


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Yield ranges of successive layers, with the place of the first: 0, 1, 6, 7 -> (0, [0, 2)), (2, [6, 8))"""
    start = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end] != layers[end - 1] + 1:
            yield start, range(layers[start], layers[end - 1] + 1)
            start = end
