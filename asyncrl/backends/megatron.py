"""The Megatron-Core backend as the learner sees it: rank 0 in this process, leading the others.

Light to import: Megatron itself comes with ``start``. What a rank does is in megatron_rank.py, how it is led in
followers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import huggingface
from asyncrl.backends.followers import Command, Followers, Job, Place
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.packing import MicroBatch
from asyncrl.protocols import StepResult

if TYPE_CHECKING:
    from asyncrl.backends.megatron_rank import MegatronRank

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the megatron backend."""

    distributed_optimizer: bool = True
    """With more than one rank: each keeps and updates its part of the float32 weights and AdamW's moments."""
    recompute: Literal["none", "full"] = "none"
    """full: keep one activation per layer and compute the rest again; a third more work, a fraction of the memory."""
    timeout_seconds: float = 600.0
    """A rank that makes the others wait longer than this is given up."""


class MegatronBackend:
    """Data-parallel training; rank 0 runs in the caller's process. One per process, as Megatron's state is global."""

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: Algorithm,
        optimizer: OptimizerSettings,
        temperature: float,
        device: str,
        dtype: str,
        threads: int,
        options: Options,
        ranks: int = 1,
    ) -> None:
        self._job = Job(
            model_path=model_path,
            algorithm=algorithm,
            optimizer=optimizer,
            temperature=temperature,
            device=device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
            dtype=dtype,
            threads=threads,
            is_distributed_optimizer=options.distributed_optimizer and ranks > 1,
            is_recomputing=options.recompute == "full",
        )
        self._timeout_seconds = options.timeout_seconds
        self._ranks = ranks
        self._followers: Followers | None = None
        self._own: MegatronRank | None = None

    def start(self) -> None:
        if dist.is_initialized():
            raise BackendError("torch.distributed is in use in this process; a MegatronBackend needs it for itself")
        huggingface.read_shape(self._job.model_path)  # a wrong model is told before any process starts
        timeout = timedelta(seconds=self._timeout_seconds)
        store = dist.TCPStore(_HOST, 0, None, True, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        places = [
            Place(rank=rank, ranks=self._ranks, host=_HOST, port=store.port, timeout_seconds=self._timeout_seconds)
            for rank in range(self._ranks)
        ]
        if self._ranks > 1:
            self._followers = Followers(self._job, places[1:])
        from asyncrl.backends.megatron_rank import MegatronRank  # seconds, while the fork server does the same

        if self._followers:
            self._followers.wait_until_ready()
        with self._explaining("start"):
            self._own = MegatronRank(self._job, places[0], store=store)

    def step(self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float) -> StepResult:
        if len(shares) != self._ranks:
            raise BackendError(f"{self._ranks} learner ranks need as many shares, got {len(shares)}")
        return self._together(
            [Command(name="step", micro_batches=tuple(share), learning_rate=learning_rate) for share in shares]
        )

    def logprobs(self, micro_batch: MicroBatch) -> NDArray[np.float32]:
        return self._started().logprobs(micro_batch)

    def export(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._started().export()

    def save(self, folder: Path) -> None:
        self._together([Command(name="save", folder=str(folder))] * self._ranks)

    def restore(self, folder: Path) -> None:
        self._together([Command(name="restore", folder=str(folder))] * self._ranks)

    def close(self) -> None:
        if self._followers:
            self._followers.dismiss()
        if self._own:
            self._own.close()
            self._own = None
        if self._followers:
            self._followers.close()
            self._followers = None

    def _together(self, commands: Sequence[Command]) -> StepResult:
        """Every rank obeys its command; what rank 0 makes of it."""
        if self._followers:
            self._followers.send(commands[1:])
        with self._explaining(commands[0].name):
            return self._started().obey(commands[0])

    @contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        """RuntimeError is torch's for a lost peer, a timeout and too little memory: a BackendError that says which."""
        try:
            yield
        except RuntimeError as error:
            cause = (self._followers and self._followers.obituary()) or error
            raise BackendError(f"{doing} failed on learner rank 0: {cause}") from error

    def _started(self) -> MegatronRank:
        if self._own is None:
            raise BackendError("the megatron backend is not started")
        return self._own
