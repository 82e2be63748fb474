"""How AdamW's moments are stored between updates, and updates piece by piece.

Tests: tests/unit/backends/megatron/test_megatron.py, tests/contracts/test_backend_moments.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

PIECE_NUMBERS: Final = 2**26
"""Weights that are updated together, whose moments are 512 MiB."""
_MOMENTS: Final = {"exp_avg", "exp_avg_sq"}
_PIECES_AT_ONCE: Final = 2


class StoredMoments:
    """Stores the moments of one torch.optim.AdamW between updates: on the device or the host, in 32 or 16 bits, or not.

    Saves memory on the device at any time: 8 bytes a parameter in host memory or nowhere, 4 in bfloat16. An update
    brings the moments to the device in float32 piece by piece and back, so besides weights, gradients and main weights
    (10 bytes a parameter with 16-bit weights) it needs the moments of two pieces: one is updated or returns while the
    next one arrives. AdamW computes each element on its own, so pieces change no bit.

    device        of the weights
    is_on_host    whether the stored moments are in host memory
    dtype         of the stored moments. bfloat16 rounds them after every update, as Megatron's precision-aware
                  optimizer with --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16, which needs Transformer Engine
    are_dropped   nothing is stored: every update starts from moments of zero, as slime's --use-stateless-adam

    (Megatron's own offload runs AdamW on the CPU, as host_update.py does.)
    Tests: test_offloaded_moments_do_not_change_training, test_moments_in_bfloat16_are_rounded_between_updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        is_on_host: bool = True,
        dtype: torch.dtype = torch.float32,
        are_dropped: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._is_on_host = is_on_host
        self._dtype = dtype
        self._are_dropped = are_dropped
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._arriving, self._returning = side_stream(device), side_stream(device)

    @contextmanager
    def updated(self) -> Iterator[None]:
        """Run the optimizer's step; inside the context it has no weights, so Megatron's own step leaves them as is."""
        on_device: deque[_Piece] = deque()
        for group in self._optimizer.param_groups:
            for weights in in_pieces(group["params"]):
                if len(on_device) == _PIECES_AT_ONCE:
                    on_device.popleft().wait()
                self.fetch(weights)
                with only(self._optimizer, weights):
                    self._optimizer.step()
                on_device.append(self.put_back(weights))
        while on_device:
            on_device.popleft().wait()
        with only(self._optimizer, []):
            yield

    def store(self, weight: torch.Tensor) -> None:
        """Store the moments of one weight: a checkpoint is restored on the device."""
        self.put_back([weight]).wait()

    def forget(self) -> None:
        """Free what is stored: the next update starts from moments of zero."""
        self._homes.clear()

    def fetch(self, weights: Sequence[torch.Tensor]) -> None:
        """Replace moments by copies on the device. They have none before their first step."""
        with on(self._arriving):
            for weight, kind, moment in self._moments(weights):
                arrived = moment.to(weight.device, torch.float32, non_blocking=True, copy=True)
                self._optimizer.state[weight][kind] = arrived
        if self._arriving is not None:
            torch.cuda.current_stream().wait_stream(self._arriving)

    def put_back(self, weights: Sequence[torch.Tensor]) -> _Piece:
        """Begin to store moments; the optimizer's state has the stored ones from now on."""
        moments = []
        if self._returning is not None:
            self._returning.wait_stream(torch.cuda.current_stream())
        with on(self._returning):
            for weight, kind, moment in self._moments(weights):
                if not self._are_dropped:
                    home = self._home(weight, kind, moment)
                    self._optimizer.state[weight][kind] = home.copy_(moment, non_blocking=True)
                moments.append(moment)
            done = None if self._returning is None else self._returning.record_event()
        if self._are_dropped:
            for weight in weights:
                self._optimizer.state.pop(weight, None)
        return _Piece(moments=moments, done=done)

    def _moments(self, weights: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        for weight in weights:
            state = self._optimizer.state.get(weight, {})
            yield from [(weight, kind, state[kind]) for kind in sorted(_MOMENTS & state.keys())]

    def _home(self, weight: torch.Tensor, kind: str, moment: torch.Tensor) -> torch.Tensor:
        """Return the buffer that stores a moment, allocated once; on the host pinned, as asynchronous copies need."""
        if (weight, kind) not in self._homes:
            device = "cpu" if self._is_on_host else moment.device
            is_pinned = self._is_on_host and moment.is_cuda
            self._homes[weight, kind] = torch.empty(
                moment.shape, dtype=self._dtype, device=device, pin_memory=is_pinned
            )
        return self._homes[weight, kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Moments on the device that are being stored, until the event ``done``."""

    moments: Sequence[torch.Tensor]
    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the moments are stored. The device's memory may be used again afterwards, not before."""
        if self.done is not None:
            self.done.synchronize()


def in_pieces(weights: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split weights into pieces of about PIECE_NUMBERS numbers; a larger weight is a piece of its own."""
    piece: list[torch.Tensor] = []
    for weight in weights:
        if piece and sum(one.numel() for one in piece) + weight.numel() > PIECE_NUMBERS:
            yield piece
            piece = []
        piece.append(weight)
    if piece:
        yield piece


@contextmanager
def only(adamw: torch.optim.Optimizer, weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Leave the optimizer only some of its weights within the context."""
    chosen, groups = set(map(id, weights)), adamw.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [weight for weight in group["params"] if id(weight) in chosen]
        yield
    finally:
        for group, all_of_it in zip(groups, whole, strict=True):
            group["params"] = all_of_it


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
