"""How shares of a batch reach the ranks: which way, how often they are encoded, and that they arrive whole."""

from __future__ import annotations

import dataclasses
import gc
import queue
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.backends.megatron import feeding, rank_group
from asyncrl.backends.megatron.feeding import Shares, receivers_of, sender_of
from asyncrl.backends.megatron.rank_group import RankGroup, RankInfo, open_store
from asyncrl.config.layout import Layout
from asyncrl.messages import codec
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.policies.batching.packing import MicroBatch, empty
from tests.harness.backends import sequences
from tests.harness.packing import pack
from tests.harness.ports import free_ports
from tests.harness.ranks import Ends

BIG = Layout(ranks=128, tensor=4, pipeline=4, context=2, expert=16)


def row(*, seed: int = 0, dtype: Any = np.uint8, layers: int = 6) -> MicroBatch:
    """A micro-batch whose tokens were sent to two experts in each layer."""
    (plain, *_) = pack(sequences(seed), max_tokens=10_000)
    generator = np.random.default_rng(seed)
    experts = generator.integers(0, np.iinfo(dtype).max, (plain.num_tokens, layers, 2)).astype(dtype)
    return dataclasses.replace(plain, experts=experts)


def is_same(one: MicroBatch, other: MicroBatch) -> bool:
    return codec.encode(one) == codec.encode(other)


def in_layers(one: MicroBatch, layers: tuple[int, ...] | None) -> MicroBatch:
    if layers is None or not len(one.experts):
        return one
    return dataclasses.replace(one, experts=one.experts[:, list(layers)])


def payload(shares: Shares, rank: int) -> NDArray[np.uint8]:
    return np.concatenate([piece.copy() for piece in shares.pieces(rank)])


@pytest.mark.parametrize("of_machine", [1, 3, 4, 128])
@pytest.mark.parametrize(
    "layout",
    [BIG, Layout(ranks=8, tensor=2), Layout(ranks=5), Layout(ranks=6, context=3), Layout(ranks=20, tensor=10)],
)
def test_every_rank_is_reached_once_and_rank_0_sends_a_share_once_a_stage(layout: Layout, of_machine: int) -> None:
    reached = [0]
    for rank in range(layout.ranks):
        receivers = receivers_of(layout, rank, of_machine=of_machine)
        assert len(receivers) <= 4
        for receiver in receivers:
            assert sender_of(layout, receiver, of_machine=of_machine) == rank < receiver
            assert layout.share(receiver) == layout.share(rank)
            assert layout.stage(receiver) == layout.stage(rank)
            reached.append(receiver)
    senders = {rank: sender_of(layout, rank, of_machine=of_machine) for rank in range(1, layout.ranks)}
    blocks = [rank for rank, sender in senders.items() if sender == 0 and rank not in reached]
    assert len(blocks) == layout.data_parallel * layout.pipeline - 1
    assert sorted(reached + blocks) == list(range(layout.ranks))


@pytest.mark.parametrize(("sizes", "shares"), [({"tensor": 8, "context": 16}, 1), ({"tensor": 4, "context": 2}, 16)])
def test_a_share_enters_each_of_16_machines_of_8_ranks_once(sizes: dict[str, int], shares: int) -> None:
    layout = Layout(ranks=128, **sizes)
    crossings = [rank for rank in range(128) if rank // 8 != sender_of(layout, rank, of_machine=8) // 8]
    assert layout.data_parallel == shares
    assert crossings == list(range(8, 128, 8))


def test_a_share_is_encoded_once_however_many_ranks_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded, encode = [], codec.encode
    monkeypatch.setattr(feeding.codec, "encode", lambda message: encoded.append(message) or encode(message))
    shares = Shares([[row(seed=number)] for number in range(4)], BIG, [(0,), (1, 2), (3, 4), (5,)])
    for rank in range(1, BIG.ranks):
        shares.feed(rank)
    payload(shares, 8)
    assert len(encoded) == 4
    assert all(one.micro_batches[0].experts is NO_EXPERTS for one in encoded)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_stage_gets_its_layers_and_each_choice_in_the_bytes_that_it_has(dtype: Any) -> None:
    layout = Layout(ranks=4, pipeline=2)
    given = [[row(seed=1, dtype=dtype), empty(), row(seed=2, dtype=dtype)], [row(seed=3, dtype=dtype)]]
    for layers in ((None, None), ((0, 1, 4), (2, 3, 5))):
        shares = Shares(given, layout, layers)
        assert all(
            is_same(*pair) for pair in zip(shares.own, [in_layers(one, layers[0]) for one in given[0]], strict=True)
        )
        for rank in range(1, 4):
            own = layers[layout.stage(rank)]
            feed = shares.feed(rank)
            expected = [in_layers(one, own) for one in given[layout.share(rank)]]
            found = feeding.unpack(payload(shares, rank), feed)
            assert all(is_same(*pair) for pair in zip(found, expected, strict=True))
            tokens = sum(one.num_tokens for one in expected if len(one.experts))
            assert feed.expert_bytes == tokens * (6 if own is None else 3) * 2 * np.dtype(dtype).itemsize


class Wire:
    """What ranks that are threads send one another."""

    def __init__(self, ranks: int) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (one, other): queue.Queue() for one in range(ranks) for other in range(ranks)
        }


class Group:
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self.info = wire, RankInfo(rank=rank)

    def begin_feed(self, piece: torch.Tensor, rank: int) -> Callable[[], None]:
        self._wire.queues[self.info.rank, rank].put(piece.clone())
        return lambda: None  # what was sent has been taken

    def receive_feed(self, into: torch.Tensor, rank: int) -> None:
        into.copy_(self._wire.queues[rank, self.info.rank].get(timeout=60))


def test_shares_are_passed_on_piece_by_piece_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(feeding, "_SCRATCH_BYTES", 100)
    layout = Layout(ranks=16, tensor=2, context=2, pipeline=2)
    layers = ((0, 1, 2), (3, 4, 5))
    given = [[row(seed=number), row(seed=10 + number)] for number in range(2)]
    shares, wire = Shares(given, layout, layers, of_machine=3), Wire(layout.ranks)
    with ThreadPoolExecutor(layout.ranks) as threads:
        feeds: Any = feeding.receive
        receiving = [
            threads.submit(feeds, Group(wire, rank), shares.feed(rank), layout) for rank in range(1, layout.ranks)
        ]
        sending: Any = Group(wire, 0)
        shares.send(sending)
        for rank, received in enumerate(receiving, start=1):
            expected = [in_layers(one, layers[layout.stage(rank)]) for one in given[layout.share(rank)]]
            assert all(is_same(*pair) for pair in zip(received.result(), expected, strict=True))


class Mortal(RankGroup):
    """A rank without the thread that keeps its connections open, so they end with it like those of a process."""

    def _watch(self, rank: int) -> None:
        pass

    def die(self) -> None:
        self._gloo = None
        gc.collect()


def test_a_rank_that_dies_while_shares_are_passed_on_ends_all_in_a_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0 -> 1, 2 and 1 -> 3: rank 3 dies after its first piece, which it got from rank 1."""
    monkeypatch.setattr(feeding, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(rank_group, "_GOODBYE", timedelta(seconds=0.1))
    layout, port = Layout(ranks=4, tensor=4), free_ports(1)[0]
    shares = Shares([[row()]], layout, [None])

    def join(rank: int) -> RankGroup:
        info = RankInfo(rank=rank, ranks=4, host="127.0.0.1", port=port, timeout_seconds=60.0)
        return (Mortal if rank else RankGroup)(open_store(info), info, end=Ends())

    def receive(group: Mortal) -> str:
        """As a process of this rank does."""
        problem = ""
        try:
            feeding.receive(group, shares.feed(group.info.rank), layout)
        except RuntimeError as error:
            group.fail(error)
            problem = str(error)
        group.die()
        return problem

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(join, range(4))
        between, beside, dying = (group for group in others if isinstance(group, Mortal))
        receiving = [threads.submit(receive, group) for group in (between, beside)]
        sending = threads.submit(shares.send, first)
        dying.receive_feed(torch.empty(1000, dtype=torch.uint8), 1)
        dying.die()
        assert re.match(r"learner rank 3 takes none of its share: RuntimeError: [^\[]", receiving[0].result())
        with pytest.raises(RuntimeError, match=r"learner rank 1 takes none of its share"):
            sending.result()
        assert re.search(r"learner rank 3( on \S+ \(pid \d+\) is gone| takes none of its share)", first.lost())
        first.close()
        assert "learner rank 0 passes no share on" in receiving[1].result()
