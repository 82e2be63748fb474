"""The Megatron-Core backend as the learner sees it: rank 0 in this process, leading the others.

Light to import: Megatron itself comes with ``start``. What a rank does is in megatron_rank.py, how it is led in
followers.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import flops, huggingface, models
from asyncrl.backends.followers import Command, Followers, Job, Place, Scores
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.packing import MicroBatch
from asyncrl.protocols import StepResult
from asyncrl.snapshot import Snapshot

if TYPE_CHECKING:
    from asyncrl.backends.megatron_rank import MegatronRank

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the megatron backend."""

    distributed_optimizer: bool = True
    """With more than one rank: each keeps and updates its part of the float32 weights and AdamW's moments."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass instead of kept. selective: what is cheap (norms and
    gates), a fifth of the memory for nearly nothing. full: all but one per layer, a third more work.
    """
    offload_optimizer: bool = False
    """AdamW's moments wait in the host's memory between steps: 8 bytes a parameter, taken there and back every step."""
    timeout_seconds: float = 600.0
    """A rank that makes the others wait longer than this is given up."""


class MegatronBackend:
    """Rank 0 runs in the caller's process. One per process, as Megatron's state is global.

    ``tensor_parallel`` neighbouring ranks of ``ranks`` hold one copy of the model; copies train different data.
    """

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
        tensor_parallel: int = 1,
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    ) -> None:
        if ranks % tensor_parallel:
            raise BackendError(f"{ranks} ranks cannot be split into groups of tensor_parallel = {tensor_parallel}")
        policy = AuxiliaryModel(path=model_path, objective=algorithm, optimizer=optimizer)
        self._job = Job(
            models=models.with_policy(policy, auxiliary or {}),
            temperature=temperature,
            device=device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu",
            dtype=dtype,
            threads=threads,
            tensor_parallel=tensor_parallel,
            is_distributed_optimizer=options.distributed_optimizer and ranks > tensor_parallel,
            recompute=options.recompute,
            is_offloading=options.offload_optimizer,
        )
        self._timeout_seconds = options.timeout_seconds
        self._ranks = ranks
        self._shape: huggingface.ModelShape | None = None
        self._followers: Followers | None = None
        self._own: MegatronRank | None = None

    def start(self) -> None:
        if dist.is_initialized():
            raise BackendError("torch.distributed is in use in this process; a MegatronBackend needs it for itself")
        shapes = {}
        for name, model in self._job.models.items():  # a wrong model is told before any process starts
            shapes[name] = huggingface.read_shape(model.path, where=models.where(name))
            whose = "the model" if name == POLICY else f"the {name}"
            huggingface.require_divisible(shapes[name], self._job.tensor_parallel, whose=whose)
        self._shape = shapes[POLICY]
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

    def step(self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY) -> StepResult:
        trained = {name: held for name, held in self._job.models.items() if held.is_trained}
        models.find(trained, model, doing="step")
        began = time.perf_counter()
        result: StepResult = self._together(self._commands("step", shares, model=model, learning_rate=learning_rate))
        if model != POLICY:
            return result
        return StepResult(metrics={**result.metrics, **self._speed(shares, time.perf_counter() - began)})

    def _commands(
        self, name: str, shares: Sequence[Sequence[MicroBatch]], *, model: str, learning_rate: float = 0.0
    ) -> list[Command]:
        """One per rank: those that hold one copy of a model together work on the same share."""
        copies = self._ranks // self._job.tensor_parallel
        if len(shares) != copies:
            raise BackendError(f"{copies} data-parallel learner ranks need as many shares, got {len(shares)}")
        return [
            Command(name=name, model=model, micro_batches=tuple(share), learning_rate=learning_rate)
            for share in shares
            for _ in range(self._job.tensor_parallel)
        ]

    def _speed(self, shares: Sequence[Sequence[MicroBatch]], seconds: float) -> dict[str, float]:
        """Of one step over all ranks; utilisation only on a device whose peak is known."""
        lengths = np.concatenate([np.diff(row.boundaries) for share in shares for row in share] or [np.zeros(0, int)])
        metrics = {"learner/step_tokens_per_second": float(lengths.sum()) / seconds}
        peak = flops.peak_flops(torch.cuda.get_device_name()) if self._job.device == "cuda" else None
        if peak and self._shape:
            work = flops.training_flops(self._shape, lengths.tolist())
            metrics["learner/mfu"] = work / (seconds * peak * self._ranks)
        return metrics

    def score(self, shares: Sequence[Sequence[MicroBatch]], *, model: str = POLICY) -> list[list[NDArray[np.float32]]]:
        models.find(self._job.models, model, doing="score")
        own: Scores = self._together(self._commands("score", shares, model=model))
        others = self._followers.scores(every=self._job.tensor_parallel) if self._followers else []
        return [list(scores.rows) for scores in [own, *others]]

    def export(self) -> Snapshot:
        snapshot: Snapshot = self._together([Command(name="export")] * self._job.tensor_parallel)
        return snapshot

    def save(self, folder: Path) -> None:
        self._together([Command(name="save", folder=str(folder))] * self._ranks)

    def restore(self, folder: Path) -> None:
        models.require_saved(folder, (name for name, model in self._job.models.items() if model.is_trained))
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

    def _together(self, commands: Sequence[Command]) -> Any:
        """The first ranks obey a command each; what rank 0 makes of its own."""
        if self._followers and self._own:
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
