"""The processes of the ranks besides rank 0, which is the learner's.

Rank 0 starts them if all ranks are on its machine (ChildRanks). Otherwise torchrun, `asyncrl run` or another launcher
starts one process per rank. Either way such a process runs ``serve`` until rank 0 ends. Cheap to import.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Any, Final

from asyncrl.backends.megatron import feeding
from asyncrl.backends.megatron.job import Command, Done, Job
from asyncrl.backends.megatron.rank_group import COMMAND, RESULT, RankGroup, RankInfo, describe, open_store
from asyncrl.errors import AsyncRLError, BackendError
from asyncrl.messages import codec

_GOODBYE_SECONDS: Final = 5.0

log = logging.getLogger("asyncrl.learner")


def serve(job: Job, info: RankInfo, *, settings: Mapping[str, str] | None = None) -> None:
    """Run as a rank other than 0: execute commands until rank 0 says goodbye.

    Raises ConfigError if this rank differs from rank 0 in ``settings``, BackendError if rank 0 does not come or is
    gone. Any other error is told to rank 0 and ends this process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_IGN)  # rank 0 handles them: it drains, and needs its ranks
    group = RankGroup(open_store(info), info, settings=settings)
    try:
        from asyncrl.backends.megatron.rank import MegatronRank  # takes five seconds, except in a fork

        rank = MegatronRank(job, info, store=group.store)
        rank.parts.serve(group)
        while data := group.receive(0, COMMAND):
            command = codec.decode(data, Command)
            if command.feed is not None:
                command = replace(command, micro_batches=feeding.receive(group, command.feed, job.layout))
            result = rank.execute(command)
            group.send(codec.encode(Done() if result is None else result), 0, RESULT)
    except Exception as error:
        group.fail(error)  # first: this process ends when its part of a checkpoint is written
        if isinstance(error, AsyncRLError):
            raise
        raise BackendError(f"learner rank {info.rank}: {group.lost() or describe(error)}") from error
    group.close()
    rank.close()


class ChildRanks:
    """Ranks 1 and up of a learner whose ranks are all on this machine. They end with it."""

    def __init__(self, job: Job, info: RankInfo) -> None:
        """info: that of rank 0, with the port of its store. Raises BackendError."""
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        context: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        if job.device == "cpu":
            context = multiprocessing.get_context("forkserver")
            # Reading a config imports transformers' models and torch's compiler. The fork server does it once for all.
            context.set_forkserver_preload(["asyncrl.backends.megatron.rank", "transformers.models.auto.modeling_auto"])
        for rank in range(1, info.ranks):
            child = replace(info, rank=rank, local_rank=rank)
            process = context.Process(target=_run_child, args=(job, child), name=f"learner-rank-{rank}", daemon=True)
            try:
                with _without_sigterm():
                    process.start()
            except (OSError, RuntimeError) as error:  # no memory, descriptors, processes or threads are left
                self.kill()
                raise BackendError(f"learner rank {rank} cannot be started: {error}") from error
            self._processes[rank] = process
        atexit.register(self.kill)  # multiprocessing would send them SIGTERM, and wait for them

    def why_ended(self, rank: int, within: float) -> str:
        """Return the exit code of a rank that ends within so many seconds; "" while it runs."""
        process = self._processes.get(rank)
        if process is None:
            return ""
        process.join(within)
        return "" if process.exitcode is None else f"it ended with exit code {process.exitcode}"

    def close(self) -> None:
        """Wait for the processes to exit, and kill those that do not."""
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        atexit.unregister(self.kill)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
            process.close()
        self._processes.clear()

    def kill_and_exit(self, code: int) -> None:
        """End this process with its ranks: one that is stopped would stay."""
        for process in self._processes.values():
            process.kill()
        os._exit(code)


def _run_child(job: Job, info: RankInfo) -> None:
    gc.freeze()  # a collection in a fork would copy every page of what the fork server has imported
    try:
        serve(job, info)
    except AsyncRLError as error:  # rank 0 was told, if it is there, and says it in its own words
        print(f"asyncrl learner: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)  # at once: a collective of another thread may never return


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Block SIGTERM here, and in processes that start meanwhile, the fork server included.

    On a signal to all processes rank 0 drains, and needs its ranks.
    """
    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
