"""Memory that every tensor-parallel rank of a machine can read and write, by torch's symmetric memory (CUDA, NVLink).

Copies between GPUs run on their copy engines. NCCL's kernels would take multiprocessors from the matrix products that
run meanwhile, and the products could keep NCCL's kernels from starting.
"""

from __future__ import annotations

import hashlib
import os
from typing import ClassVar, Final

import torch
import torch.distributed as dist

from asyncrl.backends.megatron.overlapped_linear import Memory
from asyncrl.os_process import process_space

_TRIED_BYTES: Final = 2**16
_KEPT: Final = 256
"""Tensors that a window keeps. Rows have different lengths in every step."""


class Window:
    """Memory of the same size on every rank of a group. Every rank can access the memory of all."""

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

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
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


def why_not(group: dist.ProcessGroup) -> str:
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


def reads_all(window: Memory, *, rank: int, size: int) -> bool:
    """Return whether this rank reads what every rank has written to its own memory. Collective."""
    shape = (_TRIED_BYTES,)
    window.of(rank, shape, torch.uint8).fill_(1 + rank)
    window.barrier()
    read = torch.stack([window.of(other, shape, torch.uint8).clone() for other in range(size)])
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
