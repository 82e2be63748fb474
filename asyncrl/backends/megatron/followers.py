"""Processes of a Megatron learner: rank 0 leads, the others follow over pipes.

A command is a message, encoded by our codec, on each follower's pipe; all ranks then meet in Megatron's collectives.
Scores come back over the pipes, from the ranks that have them. A follower exits when its pipe closes or its
parent dies. The leader detects a dead follower while waiting for it to become ready, or when a collective fails. On a
CPU, followers are forked from a server that has imported Megatron once.
Several nodes: a launcher would call ``follow`` on each, with the leader's address in ``Place`` and any object that has
``recv_bytes`` and ``send_bytes`` (such as multiprocessing.connection.Client).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from asyncrl.backends.megatron.rank_commands import Command, Job, Place, Scores
from asyncrl.errors import BackendError, StepFailed
from asyncrl.messages import codec
from asyncrl.os_process import signal_on_parent_death

_GOODBYE_SECONDS = 5.0


class Rank(Protocol):
    """Implemented by rank.MegatronRank."""

    def obey(self, command: Command) -> object: ...

    def close(self) -> None: ...


class Followers:
    """Ranks 1 and up, as seen by the leader."""

    def __init__(self, job: Job, places: Sequence[Place]) -> None:
        self._links: list[tuple[Place, Connection, multiprocessing.process.BaseProcess]] = []
        context: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        if job.device == "cpu":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["asyncrl.backends.megatron.rank", "transformers.models.auto"])
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=follow, args=(job, place, theirs), name=f"learner-rank-{place.rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._links.append((place, ours, process))

    def wait_until_ready(self) -> None:
        """Wait until every follower has finished its imports and is about to join. Raises BackendError."""
        for place, connection, process in self._links:
            ready = multiprocessing.connection.wait([connection, process.sentinel], place.timeout_seconds)
            if not ready:
                raise BackendError(f"learner rank {place.rank} did not start within {place.timeout_seconds:g} s")
            try:
                connection.recv_bytes()
            except (EOFError, OSError):
                raise BackendError(self.obituary() or f"learner rank {place.rank} closed its pipe") from None

    def send(self, commands: Sequence[Command | None]) -> None:
        """Send commands[i] to the i-th follower, if there is one. Raises BackendError when one has died."""
        for (place, connection, _), command in zip(self._links, commands, strict=True):
            if command is None:
                continue
            try:
                connection.send_bytes(codec.encode(command))
            except OSError as error:
                raise BackendError(self.obituary() or f"learner rank {place.rank} is gone: {error}") from None

    def scores(self, ranks: Collection[int]) -> list[Scores]:
        """What these ranks have to say. Raises BackendError."""
        return [self._answer(place, connection) for place, connection, _ in self._links if place.rank in ranks]

    def problems(self) -> list[str]:
        """What went wrong on each follower in a step that failed on all ranks. Raises BackendError."""
        return [self._answer(place, connection).problem for place, connection, _ in self._links]

    def _answer(self, place: Place, connection: Connection) -> Scores:
        if not connection.poll(place.timeout_seconds):
            raise BackendError(f"learner rank {place.rank} gave no scores within {place.timeout_seconds:g} s")
        try:
            return codec.decode(connection.recv_bytes(), Scores)
        except (EOFError, OSError):
            raise BackendError(self.obituary() or f"learner rank {place.rank} closed its pipe") from None

    def obituary(self) -> str:
        """Which followers have exited, and how; empty if none. Waits up to a second for one that is about to."""
        multiprocessing.connection.wait([process.sentinel for _, _, process in self._links], 1.0)
        ended = [
            f"learner rank {place.rank} (pid {process.pid}) ended with exit code {process.exitcode}"
            for place, _, process in self._links
            if not process.is_alive()
        ]
        return "; ".join(ended)

    def dismiss(self) -> None:
        """Close the pipes, which makes followers exit."""
        for _, connection, _ in self._links:
            connection.close()

    def close(self) -> None:
        """Wait for followers to exit; kill those that do not."""
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for _, _, process in self._links:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._links.clear()


def follow(job: Job, place: Place, connection: Connection) -> None:
    """Main function of a follower: runs commands from its pipe until the leader closes it."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles Ctrl-C and stops us
    from asyncrl.backends.megatron.rank import MegatronRank  # takes five seconds, unless the fork server has it already

    connection.send_bytes(b"ready")
    rank: Rank = MegatronRank(job, place)
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            result = rank.obey(codec.decode(data, Command))
        except StepFailed as error:
            result = Scores(problem=str(error))
        if isinstance(result, Scores):
            connection.send_bytes(codec.encode(result))
    rank.close()


def _die_with_parent() -> None:
    """Linux: get SIGKILL when our parent dies.

    The parent is the fork server, which dies with the leader, or the leader's thread that called start.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # no such libc, or not Linux: the closed pipe ends us instead
        signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
