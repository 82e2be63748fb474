"""The processes of a Megatron learner: rank 0 leads, the others follow over a pipe.

A command is a message of our codec on a follower's pipe; then all ranks meet in Megatron's collectives. Scores, which
differ between ranks that have different data, come back the same way. A follower waits on its pipe and ends when that
closes or its parent dies. The leader notices a dead follower before it joins, or when a collective loses its peer. On a
CPU they are forked from a server that has imported Megatron once.
Several nodes: another launcher calls ``follow`` on each with the leader's address in ``Place`` and any object that has
``recv_bytes`` and ``send_bytes`` (multiprocessing.connection.Client).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl import codec
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.errors import BackendError
from asyncrl.policies.packing import MicroBatch

_GOODBYE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of ``ranks``; host and port are the leader's torch.distributed.TCPStore."""

    rank: int
    ranks: int
    host: str
    port: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank must know to hold the same models and the same optimizers."""

    models: Mapping[str, AuxiliaryModel]
    temperature: float
    device: str
    dtype: str
    threads: int
    tensor_parallel: int
    is_distributed_optimizer: bool
    recompute: str
    is_offloading: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One thing to do together: step, score, export, save or restore. ``micro_batches`` is the receiver's share."""

    name: str
    model: str = POLICY
    micro_batches: tuple[MicroBatch, ...] = ()
    learning_rate: float = 0.0
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a follower answers to "score": f32[N] per micro-batch of its share."""

    rows: tuple[NDArray[np.float32], ...]


class Rank(Protocol):
    """What a follower drives: megatron_rank.MegatronRank."""

    def obey(self, command: Command) -> object: ...

    def close(self) -> None: ...


class Followers:
    """Ranks 1 and up, as seen by the leader."""

    def __init__(self, job: Job, places: Sequence[Place]) -> None:
        self._links: list[tuple[Place, Connection, multiprocessing.process.BaseProcess]] = []
        context: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        if job.device == "cpu":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["asyncrl.backends.megatron_rank", "transformers.models.auto"])
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=follow, args=(job, place, theirs), name=f"learner-rank-{place.rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._links.append((place, ours, process))

    def wait_until_ready(self) -> None:
        """Every follower is alive, has imported what it needs and will join next. Raises BackendError."""
        for place, connection, process in self._links:
            ready = multiprocessing.connection.wait([connection, process.sentinel], place.timeout_seconds)
            if not ready:
                raise BackendError(f"learner rank {place.rank} did not start within {place.timeout_seconds:g} s")
            try:
                connection.recv_bytes()
            except (EOFError, OSError):
                raise BackendError(self.obituary() or f"learner rank {place.rank} closed its pipe") from None

    def send(self, commands: Sequence[Command]) -> None:
        """Give the first followers a command each. Raises BackendError when one is gone."""
        for (place, connection, _), command in zip(self._links, commands, strict=False):
            try:
                connection.send_bytes(codec.encode(command))
            except OSError as error:
                raise BackendError(self.obituary() or f"learner rank {place.rank} is gone: {error}") from None

    def scores(self, *, every: int) -> list[Scores]:
        """The answers of rank ``every``, 2 x ``every``, ...: of each group's first. Raises BackendError."""
        return [self._answer(place, connection) for place, connection, _ in self._links if place.rank % every == 0]

    def _answer(self, place: Place, connection: Connection) -> Scores:
        if not connection.poll(place.timeout_seconds):
            raise BackendError(f"learner rank {place.rank} gave no scores within {place.timeout_seconds:g} s")
        try:
            return codec.decode(connection.recv_bytes(), Scores)
        except (EOFError, OSError):
            raise BackendError(self.obituary() or f"learner rank {place.rank} closed its pipe") from None

    def obituary(self) -> str:
        """Which followers have ended and how; empty when all live. Waits a moment for one that is about to end."""
        multiprocessing.connection.wait([process.sentinel for _, _, process in self._links], 1.0)
        ended = [
            f"learner rank {place.rank} (pid {process.pid}) ended with exit code {process.exitcode}"
            for place, _, process in self._links
            if not process.is_alive()
        ]
        return "; ".join(ended)

    def dismiss(self) -> None:
        """Ask them to end, by closing their pipes."""
        for _, connection, _ in self._links:
            connection.close()

    def close(self) -> None:
        """Wait for the dismissed; kill those that stay."""
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for _, _, process in self._links:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._links.clear()


def follow(job: Job, place: Place, connection: Connection) -> None:
    """The life of a follower: consumes commands from its pipe; woken by the leader, ended by the pipe's end."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the leader's business; it ends us
    from asyncrl.backends.megatron_rank import MegatronRank  # five seconds, unless the fork server has it already

    connection.send_bytes(b"ready")
    rank: Rank = MegatronRank(job, place)
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            break
        result = rank.obey(codec.decode(data, Command))
        if isinstance(result, Scores):
            connection.send_bytes(codec.encode(result))
    rank.close()


def _die_with_parent() -> None:
    """Linux: a kill signal when our parent ends.

    That is the fork server, which ends with the leader however that dies, or the leader's thread that called start.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # no libc by that name, or not Linux: the closed pipe ends us
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
