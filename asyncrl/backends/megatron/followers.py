"""Processes of a Megatron learner: rank 0 leads, the other ranks follow.

The leader sends a command, encoded by our codec, over the link of each follower (rank_link.py). All ranks then meet in
Megatron's collectives. Ranks that have scores return them over their links, and all ranks tell when they have left
their GPUs: no collective waits for that. A follower exits when its link closes.
Orders for a follower's part of the weights use the second lane, so they run while the rank trains (held_parts.py).

A collective with a rank that is gone may never return, so a thread waits for the end of each link, and ends the leader.
A link ends when its follower dies, and when a follower that is stopped or hangs is silent for too long. If only its GPU
hangs, it is not silent, and all ranks wait. So the leader also ends if it gets no further in a step for long.

The leader may start its followers itself (ChildRanks). They exit with the leader. On a CPU they are forked from a
server that has imported Megatron once. Alternatively, each rank is started as its own process on any machine, and joins
the leader over TCP (joined_ranks.py).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, Final, Protocol, TypeVar

from asyncrl.backends.megatron.held_parts import HeldParts, PartLink
from asyncrl.backends.megatron.rank_commands import Command, Job, Left, Place, Scores
from asyncrl.backends.megatron.rank_link import HUNG_SECONDS, TICK_SECONDS, RankLink
from asyncrl.errors import AsyncRLError, BackendError, StepFailed
from asyncrl.messages import codec
from asyncrl.os_process import signal_on_parent_death

GOODBYE: Final = b""
"""Last message of a leader that ends, for followers that cannot otherwise know why their link ended."""
_GOODBYE_SECONDS = 5.0
_ENDING_SECONDS: Final = 1.0
"""Time for a rank that fails to end."""
GRACE_SECONDS: Final = 2.0
"""Time for a collective to fail by itself after a rank is gone."""
_SILENT_COMMANDS: Final = ("restore", "offload", "onload")
"""Commands that may hold the GIL for longer than HUNG_SECONDS: torch.load does for seconds a chunk. Saving and
exporting do not: torch.save to a stream, and copies between devices, release it."""
_PASSES: Final = ("step", "score")
"""Commands that run the model. They may hold the GIL when a model runs them for the first time, because they compile
kernels."""

_Answer = TypeVar("_Answer", Scores, Left)

log = logging.getLogger("asyncrl.learner")


class Rank(Protocol):
    """Implemented by rank.MegatronRank."""

    @property
    def parts(self) -> HeldParts: ...

    def obey(self, command: Command) -> object: ...

    def close(self) -> None: ...


class Followers:
    """Ranks 1 and up, as seen by the leader. If one is gone, the leader ends, even from a collective that hangs."""

    def __init__(
        self, members: Sequence[tuple[str, Place, RankLink]], *, end: Callable[[int], object] = os._exit
    ) -> None:
        """
        members  name for people, place and link of each follower
        end      ends this process with an exit code

        Raises BackendError if no thread can be started.
        """
        self._end = end
        self._is_told = threading.Event()
        """Set once the leader knows that a rank is gone, or closes."""
        self._lost: list[str] = []
        self._losing = threading.Condition()
        self._links = [(place, link) for _, place, link in members]
        self.parts = {place.rank: PartLink(place.rank, link.parts) for _, place, link in members}
        try:
            for name, _, link in members:
                threading.Thread(target=self._watch, args=(name, link), name="rank-watch", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._is_told.set()  # the ranks end now, and those already watched must not end this process
            raise BackendError(f"the learner cannot watch its ranks: {error}") from error

    def wait_until_ready(self) -> None:
        """Wait until every follower has finished its imports and is about to join. Raises BackendError."""
        for place, link in self._links:
            if not link.poll(place.timeout_seconds):
                raise BackendError(f"learner rank {place.rank} did not start within {place.timeout_seconds:g} s")
            self._received(place, link)

    def send(self, commands: Sequence[Command | None]) -> None:
        """Send commands[i] to the i-th follower unless it is None. Raises BackendError if a follower has died."""
        for (place, link), command in zip(self._links, commands, strict=True):
            if command is None:
                continue
            try:
                link.send_bytes(codec.encode(command))
            except OSError as error:
                raise BackendError(self.obituary() or f"learner rank {place.rank} is gone: {error}") from None

    def scores(self, ranks: Collection[int]) -> list[Scores]:
        """Receive the scores of these ranks. Raises BackendError."""
        return [self._answer(place, link, Scores) for place, link in self._links if place.rank in ranks]

    def problems(self) -> list[str]:
        """Receive each follower's error in a step that failed on all ranks. Raises BackendError."""
        return [self._answer(place, link, Scores).problem for place, link in self._links]

    def left(self) -> list[Left]:
        """Wait until every follower has left its GPU, after "offload". Raises BackendError."""
        return [self._answer(place, link, Left) for place, link in self._links]

    def _answer(self, place: Place, link: RankLink, kind: type[_Answer]) -> _Answer:
        if not link.poll(place.timeout_seconds):
            raise BackendError(f"learner rank {place.rank} gave no answer within {place.timeout_seconds:g} s")
        return codec.decode(self._received(place, link), kind)

    def _received(self, place: Place, link: RankLink) -> bytes:
        try:
            return link.recv_bytes()
        except (EOFError, OSError):
            raise BackendError(self.obituary() or f"learner rank {place.rank} closed its connection") from None

    def _watch(self, name: str, link: RankLink) -> None:
        """Once the rank is gone, end this process unless it learns that within seconds. A restart resumes from the
        checkpoint."""
        link.gone.wait()
        lost = f"{name} is gone: {link.problem}"
        with self._losing:
            self._lost.append(lost)
            self._losing.notify_all()
        if not self._is_told.wait(GRACE_SECONDS):
            self._end_for(lost)

    @contextlib.contextmanager
    def watched(self, doing: str, progress: Callable[[], int], *, seconds: float) -> Iterator[None]:
        """End this process if it runs the command ``doing`` and ``progress``, rank 0's, stands still for ``seconds``.

        This process, too, is alive and waits if a GPU of any rank does not finish its work. Seconds are counted in
        ticks: while this process is stopped, there is no progress.
        """
        is_over = threading.Event()

        def watch() -> None:
            last, still = progress(), 0.0
            while not is_over.wait(TICK_SECONDS):
                now = progress()
                last, still = now, still + TICK_SECONDS if now == last else 0.0
                if still >= seconds:
                    self._end_for(
                        f"{doing} stands still for {seconds:g} s (learner.options.timeout_seconds): the learner's "
                        "ranks wait for one that does not go on (look at the GPUs of all ranks), or that has much "
                        "more to do than rank 0 (raise the timeout)"
                    )
                    return

        if doing in _PASSES:  # others may wait for a disk
            threading.Thread(target=watch, name="step-watch", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _end_for(self, problem: str) -> None:
        print(f"asyncrl learner: {problem}", file=sys.stderr, flush=True)
        log.error("%s", problem)
        self._end(1)

    def obituary(self, *, within: float = _ENDING_SECONDS) -> str:
        """Name the followers that are gone, and why; "" if none. Waits ``within`` seconds for one that is ending."""
        with self._losing:
            self._losing.wait_for(lambda: self._lost, within)
            if self._lost:
                self._is_told.set()
            return "; ".join(self._lost)

    def close_links(self) -> None:
        """Say goodbye, which makes followers exit."""
        self._is_told.set()
        for _, link in self._links:
            with contextlib.suppress(OSError):
                link.send_bytes(GOODBYE)
            link.close()

    def close(self) -> None:
        """Do nothing: followers end by themselves."""


class ChildRanks(Followers):
    """Follower processes that the leader starts on its own machine."""

    def __init__(self, job: Job, places: Sequence[Place], *, end: Callable[[int], object] = os._exit) -> None:
        self._processes: list[tuple[Place, multiprocessing.process.BaseProcess]] = []
        context: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        if job.device == "cpu":
            context = multiprocessing.get_context("forkserver")
            # Reading a config imports transformers' models and torch's compiler. The fork server does it once for all.
            context.set_forkserver_preload(["asyncrl.backends.megatron.rank", "transformers.models.auto.modeling_auto"])
        with contextlib.ExitStack() as undone:
            undone.callback(self._kill)
            members = [self._start(context, job, place, undone) for place in places]
            self._end_process = end
            super().__init__(members, end=self._kill_and_end)
            undone.pop_all()
        atexit.register(self._close_at_exit)  # multiprocessing would send those left SIGTERM, and wait for them

    def _start(self, context: Any, job: Job, place: Place, undone: contextlib.ExitStack) -> tuple[str, Place, RankLink]:
        """Start a process, and say in ``undone`` how to close what stays open. Raises BackendError."""
        try:
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            with theirs, _without_sigterm():
                process = context.Process(
                    target=follow, args=(job, place, theirs), name=f"learner-rank-{place.rank}", daemon=True
                )
                process.start()
            self._processes.append((place, process))
            link = RankLink(ours, patience=place.timeout_seconds)
        except (OSError, RuntimeError) as error:  # no memory, descriptors, processes or threads are left
            raise BackendError(f"learner rank {place.rank} cannot be started: {error}") from error
        undone.callback(link.close)
        return f"learner rank {place.rank} (pid {process.pid})", place, link

    def _kill(self) -> None:
        for _, process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._processes.clear()

    def _kill_and_end(self, code: int) -> None:
        """End with all followers: one that is stopped, and its fork server, would stay."""
        for _, process in self._processes:
            process.kill()
        self._end_process(code)

    def obituary(self, *, within: float = _ENDING_SECONDS) -> str:
        """Prefer exit codes: the link of a process that has ended knows none."""
        multiprocessing.connection.wait([process.sentinel for _, process in self._processes], within)
        ended = []
        for (place, process), (_, link) in zip(self._processes, self._links, strict=True):
            if not process.is_alive():
                link.gone.wait(_ENDING_SECONDS)  # until its last message has been read
                why = f": {link.reason}" if link.reason else ""
                ended.append(
                    f"learner rank {place.rank} (pid {process.pid}) ended with exit code {process.exitcode}{why}"
                )
        if ended:
            self._is_told.set()
        return "; ".join(ended) or super().obituary(within=within)

    def close(self) -> None:
        """Wait for the processes to exit, and kill those that do not."""
        atexit.unregister(self._close_at_exit)
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for _, process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._links.clear()
        self._processes.clear()

    def _close_at_exit(self) -> None:
        self.close_links()
        self.close()


def follow(job: Job, place: Place, connection: socket.socket) -> None:
    """Main function of a child rank: runs commands until the leader closes the connection."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the leader handles them: it drains, and stops us
    link = RankLink(connection, patience=place.timeout_seconds)
    try:
        from asyncrl.backends.megatron.rank import MegatronRank  # takes five seconds, except in a fork

        link.send_bytes(b"ready")
        rank: Rank = MegatronRank(job, place)
        obey(rank, link, patience=place.timeout_seconds)
    except Exception as error:
        link.fail(error)  # first: this process ends when its part of a checkpoint is written
        if isinstance(error, AsyncRLError):
            sys.exit(error.exit_code)
        if isinstance(error, ConnectionError):
            sys.exit(f"asyncrl learner: rank {place.rank}: the learner has ended: {error}")
        raise
    rank.close()


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Block SIGTERM here, and in processes that start meanwhile, the fork server included.

    On a signal to all processes the leader drains, and needs its ranks.
    """
    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey(rank: Rank, link: RankLink, *, patience: float) -> bool:
    """Run commands from the link until it ends. Returns whether the leader said goodbye.

    The leader is told how long this rank may be silent: ``patience`` seconds during _SILENT_COMMANDS and the first
    of _PASSES, otherwise HUNG_SECONDS. Until now, while it started, it was ``patience`` as well.
    """
    threading.Thread(target=rank.parts.serve, args=(link.parts,), name="weights-parts", daemon=True).start()
    link.may_be_silent(HUNG_SECONDS)
    compiled = set[tuple[str, str]]()
    while True:
        try:
            data = link.recv_bytes()
        except EOFError:
            return False
        if data == GOODBYE:
            return True
        command = codec.decode(data, Command)
        kind = command.name, command.model
        is_silent = command.name in _SILENT_COMMANDS or (command.name in _PASSES and kind not in compiled)
        compiled.add(kind)
        try:
            with _silent(link, patience) if is_silent else contextlib.nullcontext():
                result = rank.obey(command)
        except StepFailed as error:
            result = Scores(problem=str(error))
        if isinstance(result, Scores | Left):
            link.send_bytes(codec.encode(result))


@contextlib.contextmanager
def _silent(link: RankLink, seconds: float) -> Iterator[None]:
    link.may_be_silent(seconds)
    try:
        yield
    finally:
        link.may_be_silent(HUNG_SECONDS)


def _die_with_parent() -> None:
    """On Linux, arrange for SIGKILL when our parent dies.

    The parent is the leader's thread that called start, or the fork server. The fork server ends after the leader and
    the last of its processes; there the closed link ends us.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):  # no such libc, or not Linux: the closed link ends us instead
        signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
