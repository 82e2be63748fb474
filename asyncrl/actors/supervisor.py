"""Runs the actors of one process as one failure domain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.errors import leaves

log = logging.getLogger("asyncrl.supervisor")

STUCK_EXIT_CODE = 70


async def supervise(main: Actor, *helpers: Actor, stop_seconds: float = 15.0, owns_process: bool = True) -> None:
    """Start and run all actors. When ``main`` returns, the helpers are stopped; an actor that raises stops all others.

    A HeartbeatSender among the helpers beats from before the first start until after the last stop. Raises what the
    failed actors raised, one exception or an ExceptionGroup.

    owns_process  the process is there for these actors alone: SIGTERM and SIGINT drain ``main`` if this is the main
                  thread (no other may handle signals), and actors that do not stop in ``stop_seconds`` end it
    """
    senders = [actor for actor in helpers if isinstance(actor, HeartbeatSender)]
    actors = [main, *(actor for actor in helpers if not isinstance(actor, HeartbeatSender))]
    loop = asyncio.get_running_loop()
    may_handle = owns_process and threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if may_handle else ()
    for number in numbers:
        loop.add_signal_handler(number, main.drain)
    tasks: list[asyncio.Task[None]] = []
    try:
        with _watched(tasks, stop_seconds, owns_process=owns_process) as stopping:
            async with asyncio.TaskGroup() as beats, contextlib.AsyncExitStack() as stack:
                for sender in senders:
                    stack.push_async_callback(sender.stop)
                    stack.callback(beats.create_task(sender.run(), name=sender.name).cancel)
                for actor in actors:
                    stack.push_async_callback(actor.stop)
                    await actor.start()
                    actor.phase = "running"
                async with asyncio.TaskGroup() as group:
                    tasks += [group.create_task(actor.run(), name=actor.name) for actor in actors]
                    try:
                        await asyncio.wait(tasks[:1])
                    finally:
                        stopping()
                        for task in tasks[1:]:
                            task.cancel()
    except BaseExceptionGroup as error:
        raise _only(error) from error
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _only(error: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of the exceptions in ``error`` when all are of one type, as when one engine fails many groups."""
    found = leaves(error)
    return found[0] if len({type(leaf) for leaf in found}) == 1 else error


@contextlib.contextmanager
def _watched(tasks: list[asyncio.Task[None]], seconds: float, *, owns_process: bool) -> Iterator[Callable[[], None]]:
    """A TaskGroup waits for ever for a child that lost its cancel or blocks the loop. We do not: the process exits
    with a code of its own and its launcher starts a clean one; the bus gives the work back.

    A process that is somebody else's never exits: its tasks are cancelled again, as often as it takes.
    """
    loop, is_over = asyncio.get_running_loop(), threading.Event()

    def cancel_again() -> None:
        for task in tasks:
            task.cancel()

    def watch() -> None:
        while not is_over.wait(seconds):
            names = ", ".join(task.get_name() for task in tasks if not task.done()) or "stop() of an actor"
            then = "exiting" if owns_process else "cancelling it again"
            log.critical("still running %.0f s after stop: %s; %s", seconds, names, then)
            if owns_process:
                os._exit(STUCK_EXIT_CODE)
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(cancel_again)

    watcher = threading.Thread(target=watch, name="stuck", daemon=True)
    try:
        yield watcher.start
    finally:
        is_over.set()
