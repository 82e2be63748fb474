"""Ranks that join the learner over TCP, from this or other machines: how they prove who they are, and their end.

Both ends prove, by an HMAC over what the other has just drawn, that they hold the same secret; nothing is sent that
could run. Each rank builds its job from its own run file, so what ranks must have in common is compared when they join:
a rank with another secret, other code or other settings is refused and told why, and the learner goes on waiting.
What is sent afterwards is not signed, no more than what torch.distributed sends: both belong on a network of their own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from asyncrl.backends.megatron.followers import GOODBYE, Followers, Rank, obey
from asyncrl.backends.megatron.held_parts import HeldParts
from asyncrl.backends.megatron.rank_commands import Command, Job, Place
from asyncrl.backends.megatron.tcp_link import HUNG_SECONDS, TcpLink, receive, send
from asyncrl.backends.megatron.torchrun import Seat
from asyncrl.errors import BackendError, ConfigError, MessageError
from asyncrl.messages import codec
from asyncrl.os_process import exit_within

_HANDSHAKE_SECONDS: Final = 10.0
_LARGEST: Final = 1 << 16
_RETRY_SECONDS: Final = 0.5
"""Between tries to reach a learner that does not listen yet."""
_GRACE_SECONDS: Final = 2.0
"""How long a collective may take to fail by itself once a rank is gone."""
_END_SECONDS: Final = 5.0
"""How long a rank may take to notice that the learner is gone."""
_LEAVE_SECONDS: Final = 60.0
"""How long it may take to end once it was told to."""

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a rank says of itself. ``common``: digests of what all ranks must have alike, by name."""

    rank: int
    host: str
    pid: int
    nonce: bytes
    common: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """``problem``: why it is refused, empty if not; ``port`` of the ranks' store."""

    problem: str = ""
    port: int = 0
    timeout_seconds: float = 0.0


class JoinedRanks(Followers):
    """Ranks 1 and up, as seen by the learner; one that is gone ends it, even out of a collective that would hang."""

    def __init__(
        self, joined: Mapping[int, tuple[Place, Hello, TcpLink]], *, end: Callable[[int], object] = os._exit
    ) -> None:
        """end: ends this process with an exit code"""
        members = [joined[rank] for rank in sorted(joined)]
        super().__init__([(place, link) for place, _, link in members], [link.parts for _, _, link in members])
        self._members = [(_name(hello), link) for _, hello, link in members]
        self._end = end
        self._lost: list[str] = []
        self._is_told = threading.Event()
        for name, link in self._members:
            threading.Thread(target=self._watch, args=(name, link), name="rank-watch", daemon=True).start()

    def obituary(self) -> str:
        deadline = time.monotonic() + 1.0  # one may be about to
        while not self._lost and (left := deadline - time.monotonic()) > 0:
            self._members[0][1].gone.wait(min(left, 0.05))
        if self._lost:
            self._is_told.set()
        return "; ".join(self._lost)

    def close_channels(self) -> None:
        self._is_told.set()
        for _, link in self._members:
            with contextlib.suppress(OSError):
                link.send_bytes(GOODBYE)
            link.close()

    def close(self) -> None:
        """They end by themselves."""

    def _watch(self, name: str, link: TcpLink) -> None:
        link.gone.wait()
        self._lost.append(f"{name} is gone: {link.problem}")
        if self._is_told.wait(_GRACE_SECONDS):
            return
        print(f"asyncrl learner: {self._lost[0]}", file=sys.stderr, flush=True)
        log.error("%s", self._lost[0])
        self._end(1)  # from the last checkpoint nothing is lost; a collective of a GPU may never return


def gather(seat: Seat, common: Mapping[str, str], *, port: int, timeout_seconds: float) -> JoinedRanks:
    """Wait until every other rank has joined. Raises BackendError that says which have not.

    common  what they must have as we do;  port: of the store by which they find each other
    """
    joined: dict[int, tuple[Place, Hello, TcpLink]] = {}
    deadline = time.monotonic() + timeout_seconds
    listener = _listen(seat, deadline)
    welcome = Welcome(port=port, timeout_seconds=timeout_seconds)
    with listener:
        while len(joined) < seat.ranks - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                for _, _, link in joined.values():
                    link.close()
                missing = ", ".join(str(rank) for rank in range(1, seat.ranks) if rank not in joined)
                raise BackendError(
                    f"learner rank {missing} of {seat.ranks} has not joined within {timeout_seconds:g} s at "
                    f"{seat.host}:{seat.port}; start `asyncrl learner` there with the same secret, and look at its log"
                ) from None
            hello = _admit(connection, seat, common, welcome, joined)
            if hello is None:
                connection.close()
                continue
            place = Place(rank=hello.rank, ranks=seat.ranks, host=seat.host, port=port, timeout_seconds=timeout_seconds)
            joined[hello.rank] = (place, hello, TcpLink(connection, patience=timeout_seconds))
            log.info("%s has joined", _name(hello))
    return JoinedRanks(joined)


def _listen(seat: Seat, deadline: float) -> socket.socket:
    """At a port that a connection of somebody else may have for a while."""
    while True:
        left = deadline - time.monotonic()
        try:
            return seat.listen(timeout_seconds=max(_RETRY_SECONDS, left))
        except (OSError, RuntimeError) as error:
            if left <= 0:
                raise BackendError(
                    f"learner rank 0 cannot listen at {seat.host}:{seat.port} (MASTER_PORT): {error}"
                ) from None
            time.sleep(_RETRY_SECONDS)


def _admit(
    connection: socket.socket,
    seat: Seat,
    common: Mapping[str, str],
    welcome: Welcome,
    joined: Mapping[int, tuple[Place, Hello, TcpLink]],
) -> Hello | None:
    """The rank at the other end; None if it is refused, and told why."""
    nonce = secrets.token_bytes(32)
    try:
        connection.settimeout(_HANDSHAKE_SECONDS)
        send(connection, nonce)
        signed = receive(connection, largest=_LARGEST)
        said = _verified(seat.secret, nonce, signed)
        if said is None:
            log.warning(
                "a connection from %s is refused: it has another ASYNCRL_LEARNER_SECRET", connection.getpeername()[0]
            )
            send(connection, nonce)  # signed with nothing: it learns that we have another one
            return None
        hello = codec.decode(said, Hello)
        problem = _problem(hello, seat, common, joined)
        answer = Welcome(problem=problem) if problem else welcome
        send(connection, _signed(seat.secret, said, codec.encode(answer)))
    except (OSError, MessageError) as error:
        log.warning("a connection to the learner's ranks failed: %s", error)
        return None
    if problem:
        log.warning("%s is refused: %s", _name(hello), problem)
        return None
    return hello


def _problem(
    hello: Hello, seat: Seat, common: Mapping[str, str], joined: Mapping[int, tuple[Place, Hello, TcpLink]]
) -> str:
    """Why a rank cannot be one of us."""
    if not 0 < hello.rank < seat.ranks:
        return f"there is no rank {hello.rank} beside the learner's, of {seat.ranks}"
    if (before := joined.get(hello.rank)) is not None and not before[2].gone.is_set():
        return f"{_name(before[1])} has joined already"
    others = sorted(name for name in {*common, *hello.common} if common.get(name) != hello.common.get(name))
    return f"it differs from the learner's in {', '.join(others)}; start both from the same" if others else ""


def serve(job: Job, seat: Seat, common: Mapping[str, str], *, timeout_seconds: float) -> None:
    """Be a rank until the learner says goodbye.

    Raises ConfigError when the learner refuses it, BackendError when it does not come or is gone.
    """
    link, place = _join(seat, common, timeout_seconds=timeout_seconds)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the learner drains, for which it needs us
    is_over = threading.Event()
    threading.Thread(target=_end_with, args=(link, is_over), name="learner-watch", daemon=True).start()
    from asyncrl.backends.megatron.rank import MegatronRank  # takes five seconds

    try:
        link.send_bytes(b"ready")
        rank: Rank = MegatronRank(job, place)
        if obey(HeardRank(rank, link, patience=timeout_seconds), link, link.parts):
            is_over.set()
    except Exception:
        # Another rank may be what is gone: then the learner hears of that one first, and not of us.
        if not link.gone.wait(_GRACE_SECONDS):
            raise
    if not is_over.is_set():
        raise BackendError(f"learner rank {seat.rank}: the learner at {seat.host} is gone")
    rank.close()


class HeardRank:
    """A rank that is heard while it computes. Files are read and written in calls that hold Python's lock: for these
    the learner is to have ``patience``, in seconds."""

    def __init__(self, rank: Rank, link: TcpLink, *, patience: float) -> None:
        self._rank, self._link, self._patience = rank, link, patience
        link.may_be_silent(HUNG_SECONDS)

    @property
    def parts(self) -> HeldParts:
        return self._rank.parts

    def obey(self, command: Command) -> object:
        if command.name in ("step", "rehearse", "score"):
            return self._rank.obey(command)
        self._link.may_be_silent(self._patience)
        try:
            return self._rank.obey(command)
        finally:
            self._link.may_be_silent(HUNG_SECONDS)

    def close(self) -> None:
        self._rank.close()


def _end_with(link: TcpLink, is_over: threading.Event) -> None:
    """A rank that waits in a collective for a learner that is gone would wait long."""
    link.gone.wait()
    if is_over.wait(_END_SECONDS):
        exit_within(_LEAVE_SECONDS, 0)
    else:
        os._exit(1)


def _join(seat: Seat, common: Mapping[str, str], *, timeout_seconds: float) -> tuple[TcpLink, Place]:
    """Wait for the learner and be admitted."""
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = seat.connect(timeout_seconds=left)
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            welcome = _introduce(connection, seat, common)
        except (OSError, MessageError):  # of a learner that has just ended, or somebody else's port
            connection.close()
            time.sleep(_RETRY_SECONDS)
            continue
        if welcome.problem:
            connection.close()
            raise ConfigError(f"learner rank {seat.rank} is refused by {seat.host}: {welcome.problem}")
        place = Place(
            rank=seat.rank,
            ranks=seat.ranks,
            local_rank=seat.local_rank,
            host=seat.host,
            port=welcome.port,
            timeout_seconds=welcome.timeout_seconds,
        )
        return TcpLink(connection, patience=welcome.timeout_seconds), place
    raise BackendError(
        f"learner rank {seat.rank}: no learner at {seat.host}:{seat.port} within {timeout_seconds:g} s; is rank 0 up?"
    )


def _introduce(connection: socket.socket, seat: Seat, common: Mapping[str, str]) -> Welcome:
    connection.settimeout(_HANDSHAKE_SECONDS)
    nonce = receive(connection, largest=_LARGEST)
    hello = Hello(
        rank=seat.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        nonce=secrets.token_bytes(32),
        common=common,
    )
    said = codec.encode(hello)
    send(connection, _signed(seat.secret, nonce, said))
    answer = _verified(seat.secret, said, receive(connection, largest=_LARGEST))
    if answer is None:
        return Welcome(problem="it has another ASYNCRL_LEARNER_SECRET")
    return codec.decode(answer, Welcome)


def common(secret: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Digests of our code, its packages and ``settings``, keyed so that they tell nobody else anything."""
    values = {"the code of asyncrl": _code(), "torch": metadata.version("torch")}
    values["megatron-core"] = metadata.version("megatron-core")
    values |= {name: repr(value) for name, value in settings.items()}
    return {name: _mac(secret, b"common", value.encode()).hex()[:16] for name, value in values.items()}


@functools.cache
def _code() -> str:
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _name(hello: Hello) -> str:
    return f"learner rank {hello.rank} on {hello.host} (pid {hello.pid})"


def _signed(secret: str, challenge: bytes, data: bytes) -> bytes:
    return _mac(secret, challenge, data) + data


def _verified(secret: str, challenge: bytes, signed: bytes) -> bytes | None:
    mac, data = signed[:32], signed[32:]
    return data if hmac.compare_digest(mac, _mac(secret, challenge, data)) else None


def _mac(secret: str, challenge: bytes, data: bytes) -> bytes:
    return hmac.digest(secret.encode(), hashlib.sha256(challenge).digest() + data, "sha256")
