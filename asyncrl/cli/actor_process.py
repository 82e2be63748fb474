"""What the processes of a learner and of a rollout worker share: the event loop, supervision, and a sure exit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.actors.base import Actor
from asyncrl.actors.supervisor import STUCK_EXIT_CODE, supervise
from asyncrl.os_process import exit_if_a_thread_never_runs, exit_within

EXIT_SECONDS = 60.0
"""How long a process may take to end after its actors have stopped."""


def in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on uvloop if it is installed, else on asyncio's own loop."""
    exit_if_a_thread_never_runs(STUCK_EXIT_CODE)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: int = uvloop.run(main)
    return result


async def supervised(*actors: Actor) -> None:
    """Run the actors until the first one is done or fails; a failed process ends within EXIT_SECONDS."""
    try:
        await supervise(*actors)
    except BaseException as error:
        exit_within(EXIT_SECONDS, getattr(error, "exit_code", 1))
        raise
