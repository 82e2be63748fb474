"""Memory that every tensor-parallel rank of a machine can read and write, by torch's symmetric memory (CUDA, NVLink).

Copies between GPUs run on their copy engines. NCCL's kernels would take multiprocessors from the matrix products that
run meanwhile, and the products could keep NCCL's kernels from starting.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from asyncrl.os_process import process_space


class Window:
    """Memory of the same size on every rank of a group. Every rank can access the memory of all."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int) -> None:
        """Collective. Raises RuntimeError if the GPUs cannot access each other's memory."""
        self.num_bytes = num_bytes
        from torch._C._distributed_c10d import _SymmetricMemory  # builds without distributed have none

        size, device = (num_bytes,), torch.device("cuda", torch.cuda.current_device())
        self._memory = _SymmetricMemory.empty_strided_p2p(size, (1,), torch.uint8, device, group.group_name)
        self._handle = _SymmetricMemory.rendezvous(self._memory, group.group_name)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of a rank's memory as a tensor."""
        return self._handle.get_buffer(rank, shape, dtype)

    def barrier(self) -> None:
        """Let the current stream wait until every rank's current stream has come here."""
        self._handle.barrier()


def is_available(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of the group can have windows. Collective; all ranks get the same answer."""
    if dist.get_backend(group) != "nccl":
        return False
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, process_space(), group=group)
    if len(set(told)) > 1:  # handles of memory pass between processes of one machine only
        return False
    return _agreed(_has_peers(), group) and _agreed(_meets(group), group)


def _has_peers() -> bool:
    """Whether this GPU can access all others that this process sees."""
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    return all(torch.cuda.can_device_access_peer(own, other) for other in range(count) if other != own)


def _meets(group: dist.ProcessGroup) -> bool:
    try:
        Window(group, 2**20).barrier()
    except RuntimeError:
        return False
    return True


def _agreed(answer: bool, group: dist.ProcessGroup) -> bool:
    told = torch.tensor(float(answer), device="cuda")
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return bool(told)
