"""AdamW's moments in the host's memory between steps: eight bytes a parameter less on the device while activations are.

A step brings them to the device and takes them back. That costs the time of both ways, and the device needs the room
after the backward pass, when activations are gone. (Megatron's own offload runs AdamW on the host's processors.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOMENTS = {"exp_avg", "exp_avg_sq"}


class HostMoments:
    """The moments of one torch.optim.AdamW. Whoever reads them on the host waits for the device first."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Around a step."""
        for weight, state in self._optimizer.state.items():
            for kind in _MOMENTS & state.keys():
                state[kind] = state[kind].to(weight.device, non_blocking=True)
        yield
        for weight, state in self._optimizer.state.items():
            for kind in _MOMENTS & state.keys():
                home = self._home(weight, kind, state[kind])
                state[kind] = home.copy_(state[kind], non_blocking=True)

    def _home(self, weight: torch.Tensor, kind: str, moment: torch.Tensor) -> torch.Tensor:
        """Page-locked, as a copy that nobody waits for needs it; made once."""
        if (weight, kind) not in self._homes:
            self._homes[weight, kind] = torch.empty(moment.shape, dtype=moment.dtype, pin_memory=moment.is_cuda)
        return self._homes[weight, kind]
