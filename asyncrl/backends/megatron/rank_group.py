"""The ranks of a learner: how they find each other, exchange messages, and end together.

All ranks run the same program (SPMD). Rank 0 is the learner's process. It sends every rank a command and receives its
result; in between all of them meet in Megatron's collectives. Messages are bytes of our codec. They travel over gloo,
which needs nothing but sockets and goes on while a GPU computes.

    COMMAND   rank 0 -> rank   what to execute; empty: the learner ends
    FEED      rank -> rank     a share of the batch, of a length that the command says (feeding.py)
    RESULT    rank -> rank 0
    END       both ways        the last message: why this rank fails; empty: it ends in order
    PART      rank 0 -> rank   work on the rank's part of the weights, while it trains (remote_parts.py)
    PART + n  rank -> rank 0   the answer to command n

A collective with a rank that is gone may never return. So a thread waits for each rank's END. Its connection breaks
when the rank dies, whatever the cause, and then this rank ends as well. A rank that is alive but makes no progress is
bounded by the timeout of the collectives (learner.options.timeout_seconds).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from asyncrl.errors import AsyncRLError, BackendError, ConfigError
from asyncrl.messages import codec

COMMAND, FEED, RESULT, END, PART = range(5)
FOREVER: Final = timedelta(days=365)
"""Between two commands ranks may wait for as long as it takes to sample a batch."""
_GRACE_SECONDS: Final = 2.0
"""Time for a collective to fail by itself after a rank is gone."""
_POLL_SECONDS: Final = 0.05
_GOODBYE: Final = timedelta(seconds=5)
_LONGEST_PROBLEM: Final = 300
_GLOO_PLACE: Final = re.compile(r"^\[\S*gloo/\S+\] (.*?)(?:\. This is typically .*)?$")
"""Around what gloo says: where in its code, and guesses."""
_LOOPBACK: Final = "127.0.0.1"
_AGENT_KEY: Final = "asyncrl/learner"

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process among the ``ranks`` of a learner.

    local_rank   index among the ranks of its machine, and of its GPU
    local_ranks  how many ranks its machine has; 0: all
    host, port   where rank 0 serves the store by which ranks find each other; "": on this machine, at any free port
    has_agent    torchrun's agent has a store there; rank 0 then uses another port and publishes it in the agent's store
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 0
    host: str = ""
    port: int = 0
    has_agent: bool = False
    timeout_seconds: float = 600.0

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_seconds)


def rank_from_environment(
    environment: Mapping[str, str] = os.environ, *, ranks: int, timeout_seconds: float
) -> RankInfo | None:
    """Read the variables that torchrun sets; None if this process is the only one. Raises ConfigError."""

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        if text and not text.isdigit():
            raise ConfigError(f"{name}={text}: must be a whole number; torchrun sets it")
        return int(text) if text else default

    if (started := number("WORLD_SIZE", 1)) == 1:
        return None
    if started != ranks:
        raise ConfigError(
            f"learner.ranks: {ranks}, and torchrun has started {started} (WORLD_SIZE); start one process per rank"
        )
    rank, host, port = number("RANK", -1), environment.get("MASTER_ADDR", ""), number("MASTER_PORT", 0)
    if not 0 <= rank < ranks or not host or not port:
        raise ConfigError(
            f"learner.ranks: one of {ranks} processes (WORLD_SIZE) needs RANK, from 0 to {ranks - 1}, MASTER_ADDR and "
            "MASTER_PORT in its environment; torchrun sets them"
        )
    return RankInfo(
        rank=rank,
        ranks=ranks,
        local_rank=number("LOCAL_RANK", 0),
        local_ranks=number("LOCAL_WORLD_SIZE", 0),
        host=host,
        port=port,
        has_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        timeout_seconds=timeout_seconds,
    )


def rank_environments(*, ranks: int, machines: int, port: int) -> list[dict[str, str]]:
    """Return the environment of each process as torchrun sets it, for ``machines`` groups of them on this machine.

    A single machine has one process, which starts the other ranks.
    """
    if machines == 1:
        return [{"WORLD_SIZE": "1"}]
    each = ranks // machines
    return [
        {
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "GROUP_RANK": str(rank // each),
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]


def open_store(info: RankInfo) -> Any:
    """Return the dist.TCPStore by which the ranks find each other: served by rank 0. Raises BackendError.

    It has no authentication, so it listens on this machine alone if all ranks are here.
    """
    if not info.host and info.rank:
        return _connect_store(_LOOPBACK, info.port, info.timeout)
    if not info.host:  # torch itself would listen on all interfaces
        listener = socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
        return _serve_store(_LOOPBACK, listener.getsockname()[1], info, listener.detach())
    try:
        if info.has_agent:
            agent = _connect_store(info.host, info.port, info.timeout)
            if info.rank:
                return _find_behind(agent, info)
            store = _serve_store(info.host, 0, info)
            agent.set(_AGENT_KEY, str(store.port))
            return store
        if info.rank == 0:
            return _serve_store(info.host, info.port, info)
        return _connect_store(info.host, info.port, info.timeout)
    except RuntimeError as error:
        raise BackendError(
            f"learner rank {info.rank}: no store at {info.host}:{info.port} (MASTER_ADDR, MASTER_PORT) within "
            f"{info.timeout_seconds:g} s; is rank 0 up, and no other program at its port? {describe(error)}"
        ) from None


def _serve_store(host: str, port: int, info: RankInfo, descriptor: int | None = None) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, timeout=info.timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def _connect_store(host: str, port: int, timeout: timedelta) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def _find_behind(agent: Any, info: RankInfo) -> Any:
    """Connect to the store of rank 0. The agent's store outlives restarts, so its port may be that of a dead rank 0.

    TORCHELASTIC_RESTART_COUNT would not help: an agent counts only the failures of its own machine.
    """
    deadline = time.monotonic() + info.timeout_seconds
    while True:
        port = int(agent.get(_AGENT_KEY))
        try:
            store = _connect_store(info.host, port, timedelta(seconds=2))
            store.set_timeout(info.timeout)
            return store
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches ``host``; nothing is sent. Raises BackendError.

    Gloo itself would take that of the machine's name, which is often a loopback address.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BackendError(f"learner: no way to {host} (MASTER_ADDR): {error.strerror or error}") from None


class RankGroup:
    """One instance in each rank. Joining waits for all ranks; from then on, if one ends, all end."""

    def __init__(
        self,
        store: Any,
        info: RankInfo,
        *,
        settings: Mapping[str, str] | None = None,
        why_ended: Callable[[int, float], str] = lambda rank, within: "",
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """
        settings   digests, by name, of what all ranks must share
        why_ended  returns what this process, as its parent, knows about the end of a rank; waits for it so many seconds
        end        ends this process with an exit code

        Raises BackendError if a rank does not join, ConfigError if ranks differ in ``settings``.
        """
        self.info = info
        self.store = store
        self._why_ended = why_ended
        self._end = end
        self._gone: list[str] = []
        self._failed: list[str] = []
        self._losing = threading.Condition()
        self._is_handled = threading.Event()
        """Set once this process knows that a rank is gone, or closes."""
        self._locks: defaultdict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)
        self._names: dict[int, str] = {}
        if info.rank:
            self._introduce(settings or {})
        else:
            self._admit(settings or {})
        self._gloo = self._connect()
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank,), name="rank-watch", daemon=True) for rank in self.others
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def others(self) -> Sequence[int]:
        """The ranks that this one exchanges messages with."""
        return [0] if self.info.rank else range(1, self.info.ranks)

    def _introduce(self, settings: Mapping[str, str]) -> None:
        """Tell rank 0 who this rank is, and wait until all ranks may go on."""
        rank = self.info.rank
        hello = Hello(host=socket.gethostname() if self.info.host else "", pid=os.getpid(), settings=settings)
        try:
            self.store.set(f"hello/{rank}", codec.encode(hello))
            problem = self.store.get("welcome").decode()
        except RuntimeError as error:
            raise BackendError(f"learner rank {rank}: rank 0 ended before all had joined: {describe(error)}") from None
        if problem:
            raise ConfigError(f"learner rank {rank} is refused: {problem}")

    def _admit(self, settings: Mapping[str, str]) -> None:
        """Wait until every rank has said who and what it is, and let all of them go on."""
        deadline = time.monotonic() + self.info.timeout_seconds
        problem = ""
        for rank in self.others:
            hello = self._wait_for(rank, deadline)
            place = f" on {hello.host}" if hello.host else ""
            self._names[rank] = f"learner rank {rank}{place} (pid {hello.pid})"
            names = {*settings, *hello.settings}
            if differing := sorted(name for name in names if settings.get(name) != hello.settings.get(name)):
                problem = (
                    f"{self._names[rank]} differs from rank 0 in {', '.join(differing)}; start both with the same "
                    "code, settings and models"
                )
        self.store.set("welcome", problem)
        if problem:
            time.sleep(_GRACE_SECONDS)  # the store ends with this process, and the ranks should read why
            raise ConfigError(problem)

    def _wait_for(self, rank: int, deadline: float) -> Hello:
        while not self.store.check([f"hello/{rank}"]):
            if ended := self._why_ended(rank, 0.0):
                raise BackendError(f"learner rank {rank} did not start: {ended}")
            if time.monotonic() > deadline:
                missing = ", ".join(str(one) for one in self.others if not self.store.check([f"hello/{one}"]))
                raise BackendError(
                    f"learner rank {missing} of {self.info.ranks} has not joined within {self.info.timeout_seconds:g} "
                    "s; look at its log"
                )
            time.sleep(_POLL_SECONDS)
        return codec.decode(self.store.get(f"hello/{rank}"), Hello)

    def _connect(self) -> Any:
        """Return the gloo group. It stays out of torch.distributed's registry, whose groups end with Megatron's."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        address = address_towards(self.info.host, self.info.port) if self.info.host else _LOOPBACK
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = self.info.timeout
        try:
            return gloo(PrefixStore("asyncrl", self.store), self.info.rank, self.info.ranks, options)
        except RuntimeError as error:
            problem = describe(error)
            if self.info.host and address.startswith("127.") and not self.info.host.startswith("127."):
                problem += f"; {self.info.host} (MASTER_ADDR) is {address} here, where no other machine reaches it"
            raise BackendError(f"learner rank {self.info.rank} cannot reach the others: {problem}") from None

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, data: bytes, rank: int, kind: int, *, timeout: timedelta | None = None) -> None:
        """Send a message, and wait until the rank has taken it. Raises RuntimeError if the rank is gone."""
        limit = timeout or self.info.timeout
        with self._locks[rank, kind]:  # else the size of one message may be followed by the data of another
            self._gloo.send([torch.tensor([len(data)])], rank, kind).wait(limit)
            if data:
                self._gloo.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], rank, kind).wait(limit)

    def receive(self, rank: int, kind: int, *, timeout: timedelta = FOREVER) -> bytes:
        """Wait for a message. Raises RuntimeError if the rank is gone, or sends nothing before ``timeout``."""
        size = torch.zeros(1, dtype=torch.int64)
        self._gloo.recv([size], rank, kind).wait(timeout)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            self._gloo.recv([data], rank, kind).wait(timeout)
        return data.numpy().tobytes()

    def begin_feed(self, piece: torch.Tensor, rank: int) -> Callable[[], None]:
        """Begin to send bytes of a length that the other rank knows. Returns what waits until it has them.

        Both raise RuntimeError if the rank is gone, or does not take them in time.
        """
        with _naming(rank, "takes none of its share"):
            work = self._gloo.send([piece], rank, FEED)

        def finish() -> None:
            with _naming(rank, "takes none of its share"):
                work.wait(self.info.timeout)

        return finish

    def receive_feed(self, into: torch.Tensor, rank: int) -> None:
        """Receive bytes. Raises RuntimeError if the rank is gone, or does not send them in time."""
        with _naming(rank, "passes no share on"):
            self._gloo.recv([into], rank, FEED).wait(self.info.timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _watch(self, rank: int) -> None:
        """Wait for the end of a rank. Unless this process learns of it within seconds, end it: a restart resumes."""
        name = self._names.get(rank, f"learner rank {rank}")
        try:
            problem = self.receive(rank, END).decode(errors="replace")
            if not problem:
                return
            lost, known = f"{name} failed: {problem}", self._failed
        except RuntimeError:
            if self._is_handled.is_set():
                return
            lost = f"{name} is gone: {self._why_ended(rank, 0.5) or 'its connection has ended'}"
            known = self._gone
        with self._losing:
            known.append(lost)
            self._losing.notify_all()
        if not self._is_handled.wait(_GRACE_SECONDS):
            if self.info.rank == 0:  # the learner speaks for all
                print(f"asyncrl learner: {lost}", file=sys.stderr, flush=True)
                log.error("%s", lost)
            self._end(1)

    def lost(self, *, within: float = 1.0) -> str:
        """Name the ranks that are gone, and why; "" if none. Waits ``within`` seconds for one that is ending.

        Of ranks that say why they fail it names the first: others fail because it did.
        """
        with self._losing:
            self._losing.wait_for(lambda: self._gone or self._failed, within)
            if self._gone or self._failed:
                self._is_handled.set()
            return "; ".join([*self._gone, *self._failed[:1]])

    def fail(self, error: Exception) -> None:
        """Tell rank 0 why this rank fails."""
        with contextlib.suppress(RuntimeError):
            self.send(describe(error).encode(), 0, END, timeout=_GOODBYE)

    def close(self) -> None:
        """Say goodbye. Rank 0 also makes the others leave their loops."""
        self._is_handled.set()
        for rank in self.others:
            for kind in (COMMAND, PART, END) if self.info.rank == 0 else (END,):
                with contextlib.suppress(RuntimeError):
                    self.send(b"", rank, kind, timeout=_GOODBYE)
        for watcher in self._watchers:
            watcher.join(_GOODBYE.total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How a rank introduces itself.  host: "" if all ranks are on one machine"""

    host: str
    pid: int
    settings: Mapping[str, str]


@contextlib.contextmanager
def _naming(rank: int, problem: str) -> Iterator[None]:
    """Name the other rank in an error of gloo, which knows only an address."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"learner rank {rank} {problem}: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Return the error in one line: its first lines may be empty, or only say where it was found."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = _GLOO_PLACE.sub(r"\1", text)
    text = text if len(text) <= _LONGEST_PROBLEM else f"{text[:_LONGEST_PROBLEM]}..."
    return text if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {text}"
