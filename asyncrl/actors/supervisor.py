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


async def supervise(main: Actor, *helpers: Actor, stop_seconds: float = 15.0, owns_process: bool = True) -> None:
    """Start and run all actors. When ``main`` returns, stop the helpers. An actor that raises stops all others.

    A HeartbeatSender among the helpers runs from before the first start until after the last stop. Raises the error of
    the failed actors: one exception or an ExceptionGroup.

    owns_process  the process exists only for these actors: SIGTERM and SIGINT drain ``main`` (in the main thread only,
                  because no other may handle signals), and actors that do not stop in ``stop_seconds`` end the process
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
        exit_if_stuck = _exit_if_stuck(tasks, stop_seconds) if owns_process else contextlib.nullcontext(lambda: None)
        with exit_if_stuck as start_watching:
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
                        start_watching()
                        for task in tasks[1:]:
                            task.cancel()
    except BaseExceptionGroup as error:
        raise _unwrap(error) from error
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _unwrap(error: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception in ``error`` if all have one type, as when one engine fails many groups."""
    found = leaves(error)
    return found[0] if len({type(leaf) for leaf in found}) == 1 else error


@contextlib.contextmanager
def _exit_if_stuck(tasks: list[asyncio.Task[None]], seconds: float) -> Iterator[Callable[[], None]]:
    """Exit with code 1 if tasks do not stop: a TaskGroup waits forever for a child that lost its cancel or blocks the
    loop. The launcher restarts the process, and the bus redelivers the work. Yields the function that starts the wait.
    """
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(seconds):
            names = ", ".join(task.get_name() for task in tasks if not task.done()) or "stop() of an actor"
            log.critical("still running %.0f s after stop: %s; exiting", seconds, names)
            os._exit(1)

    try:
        yield threading.Thread(target=watch, name="stuck", daemon=True).start
    finally:
        is_over.set()
