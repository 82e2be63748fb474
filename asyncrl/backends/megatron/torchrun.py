"""A rank that is its own process, on this machine or another: reads the environment that torchrun sets.

torchrun, or a launcher like it, gives every process RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The
first rank listens at the master's port itself. If torchrun already has a store there, the first rank listens at another
port and publishes it in the store. The store outlives restarts, so a rank may read the port of a learner that has
ended; it then tries again. TORCHELASTIC_RESTART_COUNT would not help: a machine counts its own failures only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from asyncrl.errors import ConfigError

_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_STORE_KEY = "asyncrl/learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of a process among the several processes of a learner.

    rank        index among ``ranks``; 0 is the learner
    local_rank  index among the ranks on its machine, and of its GPU
    host, port  address of the master
    store_key   key in torchrun's store at that port for the port of the first rank; "": the first rank listens there
    secret      secret shared by all processes
    """

    rank: int
    ranks: int
    local_rank: int
    host: str
    port: int
    store_key: str = ""
    secret: str = field(default="", repr=False)

    def listen(self, *, timeout_seconds: float) -> socket.socket:
        """Listen for the other ranks to join. Raises OSError."""
        listener = socket.create_server(("", 0 if self.store_key else self.port), backlog=self.ranks)
        if self.store_key:
            self._store(timeout_seconds).set(self.store_key, str(listener.getsockname()[1]))
        return listener

    def connect(self, *, timeout_seconds: float) -> socket.socket:
        """Connect to the first rank. Raises OSError while it does not listen."""
        port = self.port
        if self.store_key:
            try:
                port = int(self._store(timeout_seconds).get(self.store_key))
            except RuntimeError as error:
                raise OSError(f"nothing of it at {self.host}:{self.port}: {error}") from None
        return socket.create_connection((self.host, port), timeout=timeout_seconds)

    def _store(self, timeout_seconds: float) -> Store:
        timeout = timedelta(seconds=timeout_seconds)
        store: Store = dist.TCPStore(self.host, self.port, None, False, timeout)  # type: ignore[attr-defined]
        return store


def seat(environment: Mapping[str, str] = os.environ, *, ranks: int, secret: str) -> Seat | None:
    """Return the place of this process; None if it is the only one. Raises ConfigError."""
    started = _number(environment, "WORLD_SIZE", 1)
    if started == 1:
        return None
    if started != ranks:
        raise ConfigError(
            f"learner.ranks: {ranks}, and torchrun has started {started} (WORLD_SIZE); start one process per rank"
        )
    rank = _number(environment, "RANK", -1)
    if not 0 <= rank < ranks or not environment.get("MASTER_ADDR") or not _number(environment, "MASTER_PORT", 0):
        raise ConfigError(
            f"learner.ranks: one of {ranks} processes (WORLD_SIZE) needs RANK, from 0 to {ranks - 1}, MASTER_ADDR and "
            "MASTER_PORT in its environment; torchrun sets them"
        )
    if not secret:
        raise ConfigError(
            "learner.ranks: ranks that join over the network must share a secret: set ASYNCRL_LEARNER_SECRET to the "
            "same long random word for all of them"
        )
    has_store = environment.get(_HAS_STORE) == "True"
    return Seat(
        rank=rank,
        ranks=ranks,
        local_rank=_number(environment, "LOCAL_RANK", 0),
        host=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT", 0),
        store_key=_STORE_KEY if has_store else "",
        secret=secret,
    )


def environments(*, ranks: int, machines: int, port: int) -> list[dict[str, str]]:
    """Return the environment of each process as torchrun sets it, for ``machines`` groups of them on this machine.

    A single machine has one process, which starts the other ranks.
    """
    if machines == 1:
        return [{"WORLD_SIZE": "1"}]
    each = ranks // machines
    return [
        {
            _HAS_STORE: "False",
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_RANK": str(rank // each),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, "")
    if text and not text.isdigit():
        raise ConfigError(f"{name}={text}: must be a whole number; torchrun sets it")
    return int(text) if text else otherwise
