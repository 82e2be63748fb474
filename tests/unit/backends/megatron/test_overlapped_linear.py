"""Tensor-parallel linear layers that exchange rows beside their products. The ranks are threads that share memory."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from asyncrl.backends.megatron import overlapped_linear
from asyncrl.backends.megatron.overlapped_linear import Exchange, reads_all

HIDDEN, INNER = 6, 8


class Board:
    """Windows of ranks that are threads. Every access and barrier may come late, so that ranks drift apart."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.rendezvous = threading.Barrier(size)
        self.offered: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def wait(self) -> None:
        time.sleep(self.random.choice([0, 0, 0, 0.0005]))

    def exchange(self, rank: int) -> Exchange:
        return Exchange(lambda num_bytes: Window(self, rank, num_bytes), rank=rank, size=self.size, device=CPU)


class Window:
    """See Memory. Bytes of nobody's are NaNs, so that reading too early is noticed."""

    def __init__(self, board: Board, rank: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._board = board
        board.offered[rank].append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        number = len(board.offered[rank])
        board.rendezvous.wait()
        self._memory = [offered[number - 1] for offered in board.offered]
        assert len({len(memory) for memory in self._memory}) == 1

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._board.wait()
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert num_bytes <= self.num_bytes
        return self._memory[rank][:num_bytes].view(dtype).view(shape)

    def barrier(self) -> None:
        self._board.wait()
        self._board.rendezvous.wait()


CPU = torch.device("cpu")


def together(size: int, work: Callable[[int], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def weights(layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        (torch.randn(INNER, HIDDEN, dtype=torch.float64), torch.randn(HIDDEN, INNER, dtype=torch.float64))
        for _ in range(layers)
    ]


def whole(x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Output, and gradients of input and weights, without ranks."""
    leaves = [x.clone().requires_grad_(), *(one.clone().requires_grad_() for pair in layers for one in pair)]
    hidden, *matrices = leaves
    for first, second in zip(matrices[::2], matrices[1::2], strict=True):
        hidden = hidden + F.linear(F.gelu(F.linear(hidden, first)), second)
    hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    return [hidden.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def of_rank(
    exchanges: list[Exchange], x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]], rank: int
) -> list[torch.Tensor]:
    """The same on one rank: its parts."""
    exchange, size = exchanges[rank], len(exchanges)
    leaves = [x.chunk(size)[rank].clone().requires_grad_()]
    for first, second in layers:
        leaves.append(first.chunk(size)[rank].clone().requires_grad_())
        leaves.append(second.chunk(size, dim=1)[rank].clone().requires_grad_())
    hidden, *matrices = leaves
    for first, second in zip(matrices[::2], matrices[1::2], strict=True):
        inner = F.gelu(overlapped_linear.column(hidden, first, exchange))
        hidden = hidden + overlapped_linear.row(inner, second, exchange)
    hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    return [hidden.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_process_computes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_linear, "_STEP_BYTES", 64)  # so that longer rows need larger windows
    layers = weights(3)
    rows = [torch.randn(tokens, 1, HIDDEN, dtype=torch.float64) for tokens in (8, 16, 4, 64, 8, 128)]
    board = Board(size, seed=size)
    exchanges = [board.exchange(rank) for rank in range(size)]
    for x in rows:
        expected = whole(x, layers)
        made = together(size, functools.partial(of_rank, exchanges, x, layers))
        for place, value in enumerate(expected):
            parts = [one[place] for one in made]
            is_second = place > 2 and place % 2 == 1
            joined = torch.cat(parts, dim=1 if is_second else 0)
            torch.testing.assert_close(joined, value, rtol=1e-9, atol=1e-9)


def test_a_frozen_weight_gets_no_gradient_and_its_input_does() -> None:
    ((first, second),) = weights(1)
    x = torch.randn(8, 1, HIDDEN, dtype=torch.float64)
    board = Board(2, seed=1)

    def work(rank: int) -> list[torch.Tensor]:
        exchange = board.exchange(rank)
        share = x.chunk(2)[rank].clone().requires_grad_()
        inner = overlapped_linear.column(share, first.chunk(2)[rank], exchange)
        output = overlapped_linear.row(inner, second.chunk(2, dim=1)[rank], exchange)
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert share.grad is not None
        return [share.grad]

    made = together(2, work)
    expected = (second @ first).sum(0).expand(8, 1, HIDDEN)
    torch.testing.assert_close(torch.cat([one[0] for one in made]), expected)


class Apart(Window):
    """Every rank has memory of its own alone, as on hosts where copies between GPUs go wrong."""

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return super().view(rank, shape, dtype).clone() if rank else super().view(rank, shape, dtype)


@pytest.mark.parametrize(("kind", "expected"), [(Window, True), (Apart, False)], ids=["shared", "apart"])
def test_symmetric_memory_is_used_only_if_all_ranks_can_read_it(kind: type[Window], expected: bool) -> None:
    board = Board(3, seed=0)

    def work(rank: int) -> list[torch.Tensor]:
        return [torch.tensor(reads_all(kind(board, rank, 2**16), rank=rank, size=3))]

    assert together(3, work) == [[torch.tensor(expected)]] * 3
