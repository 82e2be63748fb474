"""Ranks that join the learner over TCP, from this machine or others: authentication, joining, and ending.

Each end proves that it holds the same secret, by an HMAC over a nonce that the other end has just drawn. Nothing sent
can be executed. Each rank builds its job from its own run file and folders, so what all ranks must share is compared
when a rank joins (shared_settings.py). The learner refuses a rank with another secret or with other code, settings or
weights, tells it why, and goes on waiting. Later messages are not signed, and neither are those of torch.distributed:
both need a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from asyncrl.backends.megatron.followers import GRACE_SECONDS, Followers, Rank, obey
from asyncrl.backends.megatron.rank_commands import Job, Place
from asyncrl.backends.megatron.rank_link import RankLink, receive, send
from asyncrl.backends.megatron.torchrun import Seat
from asyncrl.errors import BackendError, ConfigError, MessageError
from asyncrl.messages import codec
from asyncrl.os_process import exit_within

_HANDSHAKE_SECONDS: Final = 10.0
_LARGEST: Final = 1 << 16
_RETRY_SECONDS: Final = 0.5
"""Delay between attempts to reach a learner that does not listen yet."""
_END_SECONDS: Final = 5.0
"""Time for a rank to react by itself after the learner's connection is gone."""
_LEAVE_SECONDS: Final = 60.0
"""Time for a rank to exit after the learner said goodbye."""

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How a rank introduces itself.  common: digests of what all ranks must share, by name"""

    rank: int
    host: str
    pid: int
    nonce: bytes
    common: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The learner's reply.  problem: why the rank is refused, or "";  port: port of the ranks' store"""

    problem: str = ""
    port: int = 0
    timeout_seconds: float = 0.0


def gather(seat: Seat, common: Mapping[str, str], *, port: int, timeout_seconds: float) -> Followers:
    """Wait until every other rank has joined. Raises a BackendError that names the missing ranks.

    common  digests that the ranks must share;  port: port of the store by which the ranks find each other
    """
    joined: dict[int, tuple[Place, Hello, RankLink]] = {}
    deadline = time.monotonic() + timeout_seconds
    listener = _listen(seat, deadline)
    welcome = Welcome(port=port, timeout_seconds=timeout_seconds)
    with listener:
        while len(joined) < seat.ranks - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (address, *_) = listener.accept()
            except TimeoutError:
                for _, _, link in joined.values():
                    link.close()
                missing = ", ".join(str(rank) for rank in range(1, seat.ranks) if rank not in joined)
                raise BackendError(
                    f"learner rank {missing} of {seat.ranks} has not joined within {timeout_seconds:g} s at "
                    f"{seat.host}:{seat.port}; start `asyncrl learner` there with the same secret, and look at its log"
                ) from None
            until = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
            hello = _admit(connection, address, until, seat, common, welcome, joined)
            if hello is None:
                connection.close()
                continue
            place = Place(rank=hello.rank, ranks=seat.ranks, host=seat.host, port=port, timeout_seconds=timeout_seconds)
            joined[hello.rank] = (place, hello, RankLink(connection, patience=timeout_seconds))
            log.info("%s has joined", _name(hello))
    return Followers([(_name(hello), place, link) for _, (place, hello, link) in sorted(joined.items())])


def _listen(seat: Seat, deadline: float) -> socket.socket:
    """Listen at the port. Retries until the deadline, because another process's connection may use the port."""
    has_said = False
    while True:
        left = deadline - time.monotonic()
        try:
            return seat.listen(timeout_seconds=max(_RETRY_SECONDS, left))
        except (OSError, RuntimeError) as error:
            if left <= 0:
                raise BackendError(
                    f"learner rank 0 cannot listen at {seat.host}:{seat.port} (MASTER_PORT): {error}"
                ) from None
            if not has_said:
                where = f"{seat.host}:{seat.port} (MASTER_PORT)"
                log.warning("cannot listen at %s yet: %s; retrying for %.0f s", where, error, left)
                has_said = True
            time.sleep(_RETRY_SECONDS)


def _admit(
    connection: socket.socket,
    address: str,
    deadline: float,
    seat: Seat,
    common: Mapping[str, str],
    welcome: Welcome,
    joined: Mapping[int, tuple[Place, Hello, RankLink]],
) -> Hello | None:
    """Return the rank at the other end. If the rank is refused, tell it why and return None."""
    nonce = secrets.token_bytes(32)
    try:
        connection.settimeout(_HANDSHAKE_SECONDS)
        send(connection, nonce)
        signed = receive(connection, largest=_LARGEST, deadline=deadline)
        said = _verified(seat.secret, nonce, signed)
        if said is None:
            log.warning("a connection from %s is refused: it has another ASYNCRL_LEARNER_SECRET", address)
            send(connection, nonce)  # not signed, so the rank learns that the secrets differ
            return None
        hello = codec.decode(said, Hello)
        problem = _problem(hello, seat, common, joined)
        answer = Welcome(problem=problem) if problem else welcome
        send(connection, _signed(seat.secret, said, codec.encode(answer)))
    except (OSError, MessageError) as error:
        log.warning("a connection from %s to the learner's ranks failed: %s", address, error)
        return None
    if problem:
        log.warning("%s is refused: %s", _name(hello), problem)
        return None
    return hello


def _problem(
    hello: Hello, seat: Seat, common: Mapping[str, str], joined: Mapping[int, tuple[Place, Hello, RankLink]]
) -> str:
    """Return why a rank cannot join, or ""."""
    if not 0 < hello.rank < seat.ranks:
        return f"rank {hello.rank} is the learner's or does not exist; there are {seat.ranks} ranks"
    if (before := joined.get(hello.rank)) is not None and not before[2].gone.is_set():
        return f"{_name(before[1])} has joined already"
    others = sorted(name for name in {*common, *hello.common} if common.get(name) != hello.common.get(name))
    if not others:
        return ""
    return f"it differs from the learner in {', '.join(others)}; start both with the same code, settings and models"


def serve(job: Job, seat: Seat, common: Mapping[str, str], *, timeout_seconds: float) -> None:
    """Run as a rank until the learner says goodbye.

    Raises ConfigError when the learner refuses the rank, BackendError when the learner does not come or is gone.
    """
    link, place = _join(seat, common, timeout_seconds=timeout_seconds)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # on these signals the learner drains, and needs this rank
    is_over = threading.Event()
    threading.Thread(target=_end_with, args=(link, is_over), name="learner-watch", daemon=True).start()
    from asyncrl.backends.megatron.rank import MegatronRank  # takes five seconds

    try:
        link.send_bytes(b"ready")
        rank: Rank = MegatronRank(job, place)
        if obey(rank, link, patience=timeout_seconds):
            is_over.set()
    except Exception as error:
        # Another rank may be gone. Wait, so that the learner hears of that rank first, not of this one.
        if not link.gone.wait(GRACE_SECONDS):
            link.fail(error)
            raise
    if not is_over.is_set():
        raise BackendError(f"learner rank {seat.rank}: the learner at {seat.host} is gone")
    rank.close()


def _end_with(link: RankLink, is_over: threading.Event) -> None:
    """End this process once the learner is gone; otherwise it might wait in a collective for long."""
    link.gone.wait()
    if is_over.wait(_END_SECONDS):
        exit_within(_LEAVE_SECONDS, 0)
    else:
        os._exit(1)


def _join(seat: Seat, common: Mapping[str, str], *, timeout_seconds: float) -> tuple[RankLink, Place]:
    """Connect to the learner, with retries, and be admitted."""
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = seat.connect(timeout_seconds=left)
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            welcome = _introduce(connection, seat, common)
        except (OSError, MessageError):  # the learner has just ended, or another program has the port
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
        return RankLink(connection, patience=welcome.timeout_seconds), place
    raise BackendError(
        f"learner rank {seat.rank}: no learner at {seat.host}:{seat.port} within {timeout_seconds:g} s; is rank 0 "
        f"up, and no other process rank {seat.rank} already?"
    )


def _introduce(connection: socket.socket, seat: Seat, common: Mapping[str, str]) -> Welcome:
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    nonce = receive(connection, largest=_LARGEST, deadline=deadline)
    hello = Hello(
        rank=seat.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        nonce=secrets.token_bytes(32),
        common=common,
    )
    said = codec.encode(hello)
    send(connection, _signed(seat.secret, nonce, said))
    answer = _verified(seat.secret, said, receive(connection, largest=_LARGEST, deadline=deadline))
    if answer is None:
        return Welcome(problem="it has another ASYNCRL_LEARNER_SECRET")
    return codec.decode(answer, Welcome)


def _name(hello: Hello) -> str:
    return f"learner rank {hello.rank} on {hello.host} (pid {hello.pid})"


def _signed(secret: str, challenge: bytes, data: bytes) -> bytes:
    return _mac(secret, challenge, data) + data


def _verified(secret: str, challenge: bytes, signed: bytes) -> bytes | None:
    mac, data = signed[:32], signed[32:]
    return data if hmac.compare_digest(mac, _mac(secret, challenge, data)) else None


def _mac(secret: str, challenge: bytes, data: bytes) -> bytes:
    return hmac.digest(secret.encode(), hashlib.sha256(challenge).digest() + data, "sha256")
