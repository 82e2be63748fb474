"""Processes of a Megatron learner: rank 0 leads, the other ranks follow.

The leader sends a command, encoded by our codec, over the channel of each follower. All ranks then meet in Megatron's
collectives. Ranks that have scores return them over their channels. A follower exits when its channel closes. Orders
for a follower's part of the weights use a second channel, so they run while the rank trains (held_parts.py).

The leader may start its followers itself (ChildRanks). Their channels are pipes, and they exit when their parent dies.
On a CPU they are forked from a server that has imported Megatron once. The leader detects a dead follower while waiting
for it to become ready, or when a collective fails. A collective on a GPU may never return; there a thread waits for
the end of each follower, and ends the leader. Alternatively, each rank is started as its own process on any
machine, and joins the leader over TCP (joined_ranks.py).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from asyncrl.backends.megatron.channel import Channel
from asyncrl.backends.megatron.held_parts import HeldParts, PartLink
from asyncrl.backends.megatron.rank_commands import Command, Job, Place, Scores
from asyncrl.errors import BackendError, StepFailed
from asyncrl.messages import codec
from asyncrl.os_process import signal_on_parent_death

GOODBYE: Final = b""
"""Last message of a leader that ends, for followers that cannot otherwise know why their channel closed."""
_GOODBYE_SECONDS = 5.0
GRACE_SECONDS: Final = 2.0
"""Time for a collective to fail by itself after a rank is gone."""

log = logging.getLogger("asyncrl.learner")


class Rank(Protocol):
    """Implemented by rank.MegatronRank."""

    @property
    def parts(self) -> HeldParts: ...

    def obey(self, command: Command) -> object: ...

    def close(self) -> None: ...


class Followers:
    """Ranks 1 and up, as seen by the leader."""

    def __init__(
        self,
        links: Sequence[tuple[Place, Channel]],
        parts: Sequence[Channel],
        *,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """
        links  channels for commands
        parts  second channels of the same ranks, for their parts of the weights
        end    ends this process with an exit code
        """
        self._end = end
        self._is_told = threading.Event()
        """Set once the leader knows that a rank is gone, or closes."""
        self._links = list(links)
        self.parts = {
            place.rank: PartLink(place.rank, channel) for (place, _), channel in zip(links, parts, strict=True)
        }

    def wait_until_ready(self) -> None:
        """Wait until every follower has finished its imports and is about to join. Raises BackendError."""
        for place, channel in self._links:
            if not channel.poll(place.timeout_seconds):
                raise BackendError(f"learner rank {place.rank} did not start within {place.timeout_seconds:g} s")
            self._received(place, channel)

    def send(self, commands: Sequence[Command | None]) -> None:
        """Send commands[i] to the i-th follower unless it is None. Raises BackendError if a follower has died."""
        for (place, channel), command in zip(self._links, commands, strict=True):
            if command is None:
                continue
            try:
                channel.send_bytes(codec.encode(command))
            except OSError as error:
                raise BackendError(self.obituary() or f"learner rank {place.rank} is gone: {error}") from None

    def scores(self, ranks: Collection[int]) -> list[Scores]:
        """Receive the scores of these ranks. Raises BackendError."""
        return [self._answer(place, channel) for place, channel in self._links if place.rank in ranks]

    def problems(self) -> list[str]:
        """Receive each follower's error in a step that failed on all ranks. Raises BackendError."""
        return [self._answer(place, channel).problem for place, channel in self._links]

    def _answer(self, place: Place, channel: Channel) -> Scores:
        if not channel.poll(place.timeout_seconds):
            raise BackendError(f"learner rank {place.rank} gave no scores within {place.timeout_seconds:g} s")
        return codec.decode(self._received(place, channel), Scores)

    def _received(self, place: Place, channel: Channel) -> bytes:
        try:
            return channel.recv_bytes()
        except (EOFError, OSError):
            raise BackendError(self.obituary() or f"learner rank {place.rank} closed its channel") from None

    def _end_leader(self, lost: str) -> None:
        """End this process unless it learns within seconds that a rank is gone. A restart resumes from the
        checkpoint."""
        if self._is_told.wait(GRACE_SECONDS):
            return
        print(f"asyncrl learner: {lost}", file=sys.stderr, flush=True)
        log.error("%s", lost)
        self._end(1)

    def obituary(self) -> str:
        """Name the followers that have ended, and how; "" if none. Waits up to a second for one that is ending."""
        raise NotImplementedError

    def close_channels(self) -> None:
        """Close the channels, which makes followers exit."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for followers to exit, and kill those that do not."""
        raise NotImplementedError


class ChildRanks(Followers):
    """Follower processes that the leader starts on its own machine."""

    def __init__(self, job: Job, places: Sequence[Place], *, end: Callable[[int], object] = os._exit) -> None:
        self._pipes: list[Connection] = []
        self._parts: list[Connection] = []
        self._processes: list[tuple[Place, multiprocessing.process.BaseProcess]] = []
        context: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        if job.device == "cpu":
            context = multiprocessing.get_context("forkserver")
            # Reading a config imports transformers' models and torch's compiler. The fork server does it once for all.
            context.set_forkserver_preload(["asyncrl.backends.megatron.rank", "transformers.models.auto.modeling_auto"])
        for place in places:
            (ours, theirs), (our_parts, their_parts) = context.Pipe(), context.Pipe()
            process = context.Process(
                target=follow, args=(job, place, theirs, their_parts), name=f"learner-rank-{place.rank}", daemon=True
            )
            process.start()
            theirs.close()
            their_parts.close()
            self._pipes.append(ours)
            self._parts.append(our_parts)
            self._processes.append((place, process))
        super().__init__(list(zip(places, self._pipes, strict=True)), self._parts, end=end)
        if job.device != "cpu":
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _watch(self) -> None:
        sentinels = {process.sentinel: (place, process.pid) for place, process in self._processes}
        for sentinel in multiprocessing.connection.wait(list(sentinels)):
            place, pid = sentinels[sentinel]  # type: ignore[index]
            self._end_leader(f"learner rank {place.rank} (pid {pid}) has ended")

    def obituary(self) -> str:
        multiprocessing.connection.wait([process.sentinel for _, process in self._processes], 1.0)
        ended = [
            f"learner rank {place.rank} (pid {process.pid}) ended with exit code {process.exitcode}"
            for place, process in self._processes
            if not process.is_alive()
        ]
        if ended:
            self._is_told.set()
        return "; ".join(ended)

    def close_channels(self) -> None:
        self._is_told.set()
        for pipe in self._pipes:
            pipe.close()

    def close(self) -> None:
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for _, process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for channel in self._parts:
            channel.close()
        self._links.clear()
        self._processes.clear()


def follow(job: Job, place: Place, connection: Connection, parts: Connection) -> None:
    """Main function of a child rank: runs commands from its pipe until the leader closes the pipe."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles Ctrl-C and stops us
    from asyncrl.backends.megatron.rank import MegatronRank  # takes five seconds, unless the fork server imported it

    connection.send_bytes(b"ready")
    rank: Rank = MegatronRank(job, place)
    obey(rank, connection, parts)
    rank.close()


def obey(rank: Rank, channel: Channel, parts: Channel) -> bool:
    """Run commands from the channel until it closes. Returns whether the leader said goodbye."""
    threading.Thread(target=rank.parts.serve, args=(parts,), name="weights-parts", daemon=True).start()
    while True:
        try:
            data = channel.recv_bytes()
        except (EOFError, OSError):
            return False
        if data == GOODBYE:
            return True
        try:
            result = rank.obey(codec.decode(data, Command))
        except StepFailed as error:
            result = Scores(problem=str(error))
        if isinstance(result, Scores):
            channel.send_bytes(codec.encode(result))


def _die_with_parent() -> None:
    """On Linux, arrange for SIGKILL when our parent dies.

    The parent is the fork server, which dies with the leader, or the leader's thread that called start.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # no such libc, or not Linux: the closed pipe ends us instead
        signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
