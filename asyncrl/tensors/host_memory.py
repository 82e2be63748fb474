"""Moves the memory of tensors to the host and back in place, so existing views of a storage stay valid.

Megatron's buffers, parameters, gradients and optimizer states are views of one another, and need no change.
Test: tests/unit/tensors/test_snapshot.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class HostMemory:
    """Moves a set of tensors to the host and back. Host buffers are pinned, allocated once, and kept."""

    def __init__(
        self, kept: Callable[[], Iterable[torch.Tensor]], *, scratch: Callable[[], Iterable[torch.Tensor]] = tuple
    ) -> None:
        """
        kept     returns the tensors to move; their values are preserved
        scratch  returns tensors that are always written before they are read; they come back with arbitrary values
        """
        self._kept = kept
        self._scratch = scratch
        self._homes: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    def offload(self) -> None:
        """Free the device memory of these tensors and of all tensors that share their storage.

        Memory of a mapped file or of another process cannot be freed and stays.
        """
        assert not self._away
        storages = {one.data_ptr(): one for one in _storages(self._kept())}
        unread = {one.data_ptr(): one for one in _storages(self._scratch()) if one.data_ptr() not in storages}
        homes = {key: self._home(storage) for key, storage in storages.items()}
        for key, storage in storages.items():
            homes[key].copy_(_bytes_of(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for key, storage in (storages | unread).items():
            self._away.append((storage, storage.nbytes(), homes.get(key)))
            storage.resize_(0)
        if torch.cuda.is_available():
            _clear_workspaces()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Allocate the memory again and restore the values."""
        for storage, num_bytes, home in self._away:
            storage.resize_(num_bytes)
            if home is not None:
                _bytes_of(storage).copy_(home, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away.clear()

    def _home(self, storage: torch.UntypedStorage) -> torch.Tensor:
        home = self._homes.get(storage._cdata)
        if home is None or home.numel() != storage.nbytes():
            home = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
            self._homes[storage._cdata] = home
        return home


def _clear_workspaces() -> None:
    """Free cuBLAS's workspaces, which it allocates again. Each may be a piece of a much larger block of the allocator,
    such as one that activations had, and would keep all of it."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # has no public name
    if clear is not None:
        clear()


def _storages(tensors: Iterable[torch.Tensor]) -> Iterable[torch.UntypedStorage]:
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable() and not tensor.is_pinned():
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
