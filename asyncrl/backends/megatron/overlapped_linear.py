"""Tensor-parallel linear layers that exchange rows with other ranks while they multiply.

With sequence parallelism every rank has a share of a row's tokens between layers. A column-parallel layer gathers all
shares, and a row-parallel layer sums the ranks' partial results and keeps its own share. Megatron does the two one
after the other in the forward pass. Here the product of a share runs while the next share is copied, as in
asynchronous tensor parallelism (Wang et al., "Overlap communication with dependent computation via decomposition",
ASPLOS 2023). Ranks must run the same layers in the same order, as with collectives.
Tests: tests/unit/backends/megatron/test_overlapped_linear.py, test_overlapped_model.py, and test_two_gpus.py on GPUs.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from asyncrl.os_process import process_space

_STEP_BYTES = 64 * 2**20
"""Windows grow by multiples of this."""
_TRIED_BYTES: Final = 2**16
_KEPT: Final = 256
"""Tensors that a window keeps. Rows have different lengths in every step."""


class Window:
    """Memory of the same size on every rank of a group, by torch's symmetric memory (CUDA, NVLink).

    Every rank can read and write the memory of all ranks of its machine. Copies between GPUs run on their copy engines.
    NCCL's kernels would take multiprocessors from the matrix products that run meanwhile, and the products could keep
    NCCL's kernels from starting.
    """

    made: ClassVar[int] = 0
    """Windows made in this process. Torch finds the other ranks by a count of its own that never begins anew."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        """Collective. Raises RuntimeError if the GPUs cannot access each other's memory."""
        self.num_bytes = num_bytes
        from torch._C._distributed_c10d import _SymmetricMemory  # builds without distributed have none

        Window.made += 1
        size, device = (num_bytes,), torch.device("cuda", torch.cuda.current_device())
        self._memory = _SymmetricMemory.empty_strided_p2p(size, (1,), torch.uint8, device, group.group_name)
        self._handle = _SymmetricMemory.rendezvous(self._memory, group.group_name)
        self._tensors: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def view(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of a rank's memory as a tensor."""
        key = rank, shape, dtype
        if (made := self._tensors.get(key)) is None:  # keeping them saves the host's time
            if len(self._tensors) >= _KEPT:
                self._tensors.clear()
            made = self._tensors[key] = self._handle.get_buffer(rank, shape, dtype)
        return made

    def barrier(self) -> None:
        """Let the current stream wait until every rank's current stream has come here."""
        self._handle.barrier()


class Exchange:
    """Exchanges rows between the ranks of a group. Two windows of memory are used in turns.

    Each use has one barrier. A window is used again two turns later, so it was free on all ranks before the barrier
    between: a rank comes to its barrier only when its copies of the turn before are done.
    """

    def __init__(self, allocate: Callable[[int], Window], *, rank: int, size: int, device: torch.device) -> None:
        """``allocate``: returns a window of at least so many bytes; collective."""
        self.rank, self.size = rank, size
        self.order = [(rank + step) % size for step in range(size)]
        """The ranks from our own on, so that no two ranks copy from one at the same time."""
        self._allocate = allocate
        self._windows: list[Window | None] = [None, None]
        self._uses = 0
        """How often memory was exchanged. Equal on all ranks that are at the same place of the same layer."""
        # torch's own streams and events take a fraction of the host's time that those of torch.cuda take
        self._stream = torch.Stream(device) if device.type == "cuda" else None

    def window(self, shape: tuple[int, ...], dtype: torch.dtype) -> Window:
        """Return the window whose turn it is, with room for such a tensor. All ranks ask for the same size."""
        num_bytes = math.prod(shape) * dtype.itemsize
        self._uses += 1
        turn = self._uses % 2
        window = self._windows[turn]
        if window is None or window.num_bytes < num_bytes:
            del window
            self._free(turn)
            self._windows[turn] = window = self._allocate(-(-num_bytes // _STEP_BYTES) * _STEP_BYTES)
        return window

    def release(self) -> None:
        """Free the memory. Collective; nothing may be in progress."""
        for turn, window in enumerate(self._windows):
            if window is not None:
                window.barrier()
                self._free(turn)

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> torch.Event | None:
        """Copy on another stream, after what the current one has queued so far. Returns the end of the copy."""
        if self._stream is None:
            into.copy_(tensor)
            return None
        begun, ended = torch.Event(self._stream.device), torch.Event(self._stream.device)
        begun.record()
        begun.wait(self._stream)
        with self._stream:
            into.copy_(tensor)
        ended.record(self._stream)
        return ended

    def _free(self, turn: int) -> None:
        """Free a window. Our GPU must have reached the barrier of a later use: nobody uses this window after that."""
        if self._stream is not None:
            torch.cuda.synchronize()
        self._windows[turn] = None
        if self._stream is not None:
            torch.cuda.empty_cache()  # a window takes no memory from torch's pool


class Gathering:
    """The shares of all ranks, each [tokens, features], on their way to this one."""

    def __init__(self, exchange: Exchange, share: torch.Tensor) -> None:
        """Start to copy. Collective, as all of this."""
        share = share.contiguous()
        self._exchange, self._share = exchange, share
        window = exchange.window(share.shape, share.dtype)
        window.view(exchange.rank, share.shape, share.dtype).copy_(share)
        window.barrier()
        self._shares = share.new_empty(exchange.size, *share.shape)
        self._copied = {
            rank: exchange.copy(self._shares[rank], window.view(rank, share.shape, share.dtype))
            for rank in exchange.order[1:]
        }

    def share(self, rank: int) -> torch.Tensor:
        """Return a rank's share, once it has arrived."""
        if rank == self._exchange.rank:
            return self._share
        _wait(self._copied[rank])
        return self._shares[rank]

    def whole(self) -> torch.Tensor:
        """Return all tokens, [ranks x tokens, features]."""
        for rank in self._exchange.order[1:]:
            _wait(self._copied[rank])
        self._shares[self._exchange.rank].copy_(self._share)
        return self._shares.flatten(0, 1)


class Scattering:
    """Partial results of each rank's share, [tokens, features], on their way to the ranks that sum them."""

    def __init__(self, exchange: Exchange, shape: tuple[int, int], like: torch.Tensor) -> None:
        self._exchange = exchange
        self._shape, self._dtype = (exchange.size, *shape), like.dtype
        self._window = exchange.window(self._shape, self._dtype)
        self._received = self._window.view(exchange.rank, self._shape, self._dtype)
        self._sent: list[torch.Tensor] = []  # their memory is reused after the copies
        self.own = self._received[exchange.rank]
        """Where our partial result of our share belongs."""

    def send(self, rank: int, partial: torch.Tensor) -> None:
        """Send our partial result of another rank's share."""
        self._sent.append(partial)
        place = self._window.view(rank, self._shape, self._dtype)[self._exchange.rank]
        self._copied = self._exchange.copy(place, partial)

    def sum(self) -> torch.Tensor:
        """Return our share, summed over the ranks."""
        _wait(self._copied)
        self._window.barrier()
        if self._exchange.size == 2:  # torch adds two tensors faster than it sums them
            return self._received[0] + self._received[1]
        return self._received.sum(0)


def _wait(copied: torch.Event | None) -> None:
    if copied is not None:
        copied.wait()


class _Column(torch.autograd.Function):
    """Every rank's share of the tokens times this rank's rows of the weight. Tensors have Megatron's dimension of 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        share = x.flatten(0, 1)
        ctx.save_for_backward(share, weight)
        gathering = Gathering(exchange, share)
        output = share.new_empty(exchange.size, len(share), len(weight))
        for rank in exchange.order:
            torch.mm(gathering.share(rank), weight.t(), out=output[rank])
        return output.view(-1, 1, len(weight))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        share, weight = ctx.saved_tensors
        grad = grad_output.flatten(0, 1)
        exchange: Exchange = ctx.exchange
        needs_share, needs_weight, _ = ctx.needs_input_grad
        share_grad = weight_grad = None
        gathering = Gathering(exchange, share) if needs_weight else None  # arrives during the next products
        if needs_share:
            scattering = _scatter(exchange, grad, weight)
        if gathering is not None:
            weight_grad = grad.t() @ gathering.whole()
        if needs_share:
            share_grad = scattering.sum()[:, None]
        return share_grad, weight_grad, None


class _Row(torch.autograd.Function):
    """All tokens times this rank's columns of the weight, summed over the ranks; each rank gets its share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        tokens = x.flatten(0, 1)
        ctx.save_for_backward(tokens, weight)
        return _scatter(exchange, tokens, weight.t()).sum()[:, None]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        grad = grad_output.flatten(0, 1)
        exchange: Exchange = ctx.exchange
        needs_tokens, needs_weight, _ = ctx.needs_input_grad
        tokens_grad = weight_grad = None
        gathering = Gathering(exchange, grad)
        if needs_tokens:
            parts = torch.empty_like(tokens)
            for rank, part in _shares(parts, exchange):
                torch.mm(gathering.share(rank), weight, out=part)
            tokens_grad = parts[:, None]
        if needs_weight:
            weight_grad = gathering.whole().t() @ tokens
        return tokens_grad, weight_grad, None


def _scatter(exchange: Exchange, tokens: torch.Tensor, matrix: torch.Tensor) -> Scattering:
    """Multiply all tokens, other ranks' shares first, and send the results on their way."""
    scattering = Scattering(exchange, (len(tokens) // exchange.size, matrix.shape[1]), like=tokens)
    own, *others = _shares(tokens, exchange)
    for rank, part in others:
        scattering.send(rank, part @ matrix)
    torch.mm(own[1], matrix, out=scattering.own)
    return scattering


def _shares(tokens: torch.Tensor, exchange: Exchange) -> list[tuple[int, torch.Tensor]]:
    """Return (rank, its share of the tokens) from our own on."""
    shares = tokens.view(exchange.size, -1, tokens.shape[-1])
    return [(rank, shares[rank]) for rank in exchange.order]


def column(x: torch.Tensor, weight: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return every rank's tokens times ``weight`` [out, in]: our share [tokens, 1, in] -> [ranks x tokens, 1, out]."""
    return _Column.apply(x, weight, exchange)  # type: ignore[no-any-return, no-untyped-call]


def row(x: torch.Tensor, weight: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return our share of the ranks' summed products: all tokens [ranks x tokens, 1, in] -> our share [tokens, 1, out].

    Every rank has some columns of the weight, ``weight`` [out, in], and the same columns of the tokens.
    """
    return _Row.apply(x, weight, exchange)  # type: ignore[no-any-return, no-untyped-call]


# -- whether ranks can have windows ------------------------------------------------------------------------------------


def find_window_problem(group: dist.ProcessGroup) -> str:
    """Return why the ranks of an NCCL group cannot have windows; empty if they can. Collective, one answer for all.

    They cannot if some have made more windows than others, with earlier groups: they would wait for each other forever.
    """
    space = int.from_bytes(hashlib.sha256(process_space().encode()).digest()[:7])
    own = torch.tensor([space, Window.made], device="cuda")
    told = own.new_empty(group.size(), 2)
    dist.all_gather_into_tensor(told, own, group=group)
    spaces, made = told.t().tolist()
    if len(set(spaces)) > 1:  # handles of memory pass between processes of one machine only
        return "the ranks are on several machines, or in containers that do not see each other's processes"
    if len(set(made)) > 1:
        return "one of the ranks belonged to an earlier learner in its process"
    if not _all_agree(_has_peers(), group):
        return "the GPUs cannot access each other's memory, or NCCL_P2P_DISABLE is set"
    window, problem = None, ""
    try:
        window = Window(group, 2**20)
    except (RuntimeError, ImportError, AttributeError, TypeError) as error:  # torch's interface is not public
        problem = str(error).partition("\n")[0]
    if not _all_agree(window is not None, group):
        return f"they cannot share memory: {problem or 'see the log of another rank'}"
    assert window is not None
    if not _all_agree(reads_all(window, rank=group.rank(), size=group.size()), group):
        return "the GPUs read other bytes than were written"  # as on hosts that need NCCL_P2P_DISABLE=1
    return ""


def reads_all(window: Window, *, rank: int, size: int) -> bool:
    """Return whether this rank reads what every rank has written to its own memory. Collective."""
    shape = (_TRIED_BYTES,)
    window.view(rank, shape, torch.uint8).fill_(1 + rank)
    window.barrier()
    read = torch.stack([window.view(other, shape, torch.uint8).clone() for other in range(size)])
    written = torch.arange(1, 1 + size, dtype=torch.uint8, device=read.device)
    return bool((read == written[:, None]).all())


def _has_peers() -> bool:
    """Whether this GPU can access all others that this process sees, and may."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return False
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    return all(torch.cuda.can_device_access_peer(own, other) for other in range(count) if other != own)


def _all_agree(answer: bool, group: dist.ProcessGroup) -> bool:
    told = torch.tensor(float(answer), device="cuda")
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return bool(told)
