"""AdamW on the host: its main weights and moments are there, gradients come in pieces, and weights go back in pieces.

For models whose main weights are too much for the GPU, too: it holds 2 bytes of weights and 2 or 4 of gradients a
parameter, and the host 12 (4 of main weights, 8 of moments). The update is torch's fused AdamW on all of the rank's
threads, which reads and writes 28 bytes of host memory a parameter and is far slower than on a GPU. While it updates a
piece, the next piece's gradients arrive and the last piece's weights return. None of it runs beside the backward pass:
the first piece needs the norm of all gradients, by which they are clipped, and copies are hidden behind AdamW anyway.

Checkpoints have the same names and shards as with the update on the GPU. (Megatron's HybridDeviceOptimizer keeps its
state in inner optimizers, by which a restore into another layout could not find it.)
Tests: tests/unit/backends/megatron/test_host_update.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from asyncrl.backends.megatron import stored_moments
from asyncrl.backends.megatron.stored_moments import StoredMoments, in_pieces, on, only, side_stream

_BUFFERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a parameter that this rank updates; all three have the same elements.

    main       f32: what AdamW updates, and its key in AdamW's state
    weights    [n] of the model, on its device in 16 bits
    gradients  [n] of Megatron's buffer, on the device
    """

    main: torch.Tensor
    weights: torch.Tensor
    gradients: torch.Tensor


def move_to_host(adamw: torch.optim.Optimizer) -> None:
    """Move the optimizer's weights to the host in place. They have no gradients yet."""
    for group in adamw.param_groups:
        for main in group["params"]:
            main.data = main.data.to("cpu")


class HostUpdate:
    """Runs one torch.optim.AdamW, whose weights are on the host, for a model on a device."""

    def __init__(
        self,
        adamw: torch.optim.Optimizer,
        shards: Sequence[Shard],
        device: torch.device,
        *,
        moments: StoredMoments | None = None,
    ) -> None:
        """
        device   of the model
        moments  how moments are stored between updates, if not by AdamW itself
        """
        self._adamw = adamw
        self._shards = shards
        self._by_main = {id(shard.main): shard for shard in shards}
        self._moments = moments
        self._is_pinned = device.type == "cuda"
        self._factor = 1.0
        self._gradients: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._returned: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._arriving, self._returning = side_stream(device), side_stream(device)

    def begin(self) -> None:
        """Start from gradients as they are in Megatron's buffer."""
        self._factor = 1.0

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients, once they are in float32 on their way to the host."""
        self._factor *= factor

    def norms(self, counts: Callable[[Any], bool]) -> list[torch.Tensor]:
        """Return the norm of each gradient whose main weight ``counts``, f32 scalars on the device."""
        gradients = [shard.gradients for shard in self._shards if counts(shard.main)]
        found = list(torch._foreach_norm(gradients, dtype=torch.float32)) if gradients else []
        return found if self._factor == 1.0 else [norm * self._factor for norm in found]

    @torch.no_grad()
    def update(self) -> None:
        """Update the weights. The device's next work waits for the last of them; the host waits for AdamW."""
        pieces = [
            [self._by_main[id(main)] for main in piece] for piece in in_pieces([shard.main for shard in self._shards])
        ]
        if not pieces:
            return
        self._allocate(max(map(_numbers, pieces)))
        for stream in (self._arriving, self._returning):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
        arrived = self._fetch(pieces[0], 0)
        for number, piece in enumerate(pieces):
            if arrived is not None:
                arrived.synchronize()
            if number + 1 < len(pieces):
                arrived = self._fetch(pieces[number + 1], number + 1)
            self._step(piece, self._gradients[number % _BUFFERS])
            self._return(piece, number)
        if self._returning is not None:
            torch.cuda.current_stream().wait_stream(self._returning)

    def _allocate(self, numbers: int) -> None:
        """Allocate two pieces of gradients and of weights, once: pinned, as asynchronous copies need."""
        if not self._gradients:
            dtype = self._shards[0].weights.dtype
            for buffers, kind in ((self._gradients, torch.float32), (self._weights, dtype)):
                buffers += [torch.empty(numbers, dtype=kind, pin_memory=self._is_pinned) for _ in range(_BUFFERS)]

    def _fetch(self, piece: Sequence[Shard], number: int) -> torch.cuda.Event | None:
        """Begin to copy a piece's gradients to the host, where AdamW is done with those of two pieces ago."""
        with on(self._arriving):
            for shard, into in _places(piece, self._gradients[number % _BUFFERS]):
                for some, home in zip(_chunks(shard.gradients), _chunks(into), strict=True):
                    gradient = some.float()
                    home.copy_(gradient if self._factor == 1.0 else gradient * self._factor, non_blocking=True)
            return None if self._arriving is None else self._arriving.record_event()

    def _step(self, piece: Sequence[Shard], gradients: torch.Tensor) -> None:
        mains = [shard.main for shard in piece]
        for shard, gradient in _places(piece, gradients):
            shard.main.grad = gradient.view_as(shard.main)
        with only(self._adamw, mains):
            if self._moments is not None:
                self._moments.fetch(mains)
            self._adamw.step()
            if self._moments is not None:
                self._moments.put_back(mains)
        for main in mains:
            main.grad = None

    def _return(self, piece: Sequence[Shard], number: int) -> None:
        """Round a piece's main weights on the host, and begin to copy them to the model."""
        buffer = number % _BUFFERS
        if (copied := self._returned[buffer]) is not None:
            copied.synchronize()
        for shard, home in _places(piece, self._weights[buffer]):
            home.copy_(shard.main.view(-1))
            with on(self._returning):
                shard.weights.copy_(home, non_blocking=True)
        if self._returning is not None:
            self._returned[buffer] = self._returning.record_event()


def _numbers(piece: Sequence[Shard]) -> int:
    return sum(shard.main.numel() for shard in piece)


def _places(piece: Sequence[Shard], buffer: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield each shard of a piece with its place in a buffer."""
    return zip(piece, torch.split(buffer[: _numbers(piece)], [shard.main.numel() for shard in piece]), strict=True)


def _chunks(numbers: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor, so that little of it is on the device in float32 at a time."""
    return torch.split(numbers, stored_moments.PIECE_NUMBERS)
