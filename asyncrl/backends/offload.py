"""Offloads AdamW's moments to host memory between steps: saves 8 bytes a parameter on the device during fwd/bwd.

A step copies the moments to the device and back, two transfers. The device needs this memory only after the backward
pass, when activations have been freed. (Megatron's own offload runs AdamW on the CPU.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOMENTS = {"exp_avg", "exp_avg_sq"}


class HostMoments:
    """The moments of one torch.optim.AdamW. Synchronise with the device before reading them on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the moments on the device inside the context, for an optimizer step."""
        for weight, state in self._optimizer.state.items():
            for kind in _MOMENTS & state.keys():
                state[kind] = state[kind].to(weight.device, non_blocking=True)
        yield
        self.take_home()

    def take_home(self) -> None:
        """Move the moments to the host, wherever they are: a checkpoint is restored on the device."""
        for weight, state in self._optimizer.state.items():
            for kind in _MOMENTS & state.keys():
                home = self._home(weight, kind, state[kind])
                state[kind] = home.copy_(state[kind], non_blocking=True)

    def _home(self, weight: torch.Tensor, kind: str, moment: torch.Tensor) -> torch.Tensor:
        """Return a pinned host buffer, which asynchronous copies need; allocated once."""
        if (weight, kind) not in self._homes:
            self._homes[weight, kind] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
        return self._homes[weight, kind]
