"""Shared by learner and rollout worker processes: the event loop, supervision, and a guaranteed exit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.actors.base import Actor
from asyncrl.actors.supervisor import supervise
from asyncrl.errors import AsyncRLError
from asyncrl.os_process import exit_within

EXIT_SECONDS = 60.0
"""Time limit for a process to end after its actors have stopped."""


def in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on uvloop if it is installed, otherwise on asyncio's default loop.

    Raises AsyncRLError if a task that a user's code made calls ``sys.exit``: that ends the loop, past any code that
    awaits the task, and its exit code 0 would read as the end of the work.
    """
    try:
        try:
            import uvloop
        except ImportError:
            return asyncio.run(main)
        result: int = uvloop.run(main)
        return result
    except SystemExit as error:
        raise AsyncRLError(f"a task called sys.exit({error.code!r}); raise an error instead") from error


async def supervise_process(*actors: Actor) -> None:
    """Run the actors until the first one finishes or fails. After a failure the process ends within EXIT_SECONDS."""
    try:
        await supervise(*actors)
    except BaseException as error:
        exit_within(EXIT_SECONDS, getattr(error, "exit_code", 1))
        raise
