"""Shared by learner and rollout worker processes: the event loop, supervision, and a guaranteed exit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.actors.base import Actor
from asyncrl.actors.supervisor import supervise
from asyncrl.os_process import exit_within

EXIT_SECONDS = 60.0
"""Time limit for a process to end after its actors have stopped."""


def in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on uvloop if it is installed, otherwise on asyncio's default loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: int = uvloop.run(main)
    return result


async def supervise_process(*actors: Actor) -> None:
    """Run the actors until the first one finishes or fails. After a failure the process ends within EXIT_SECONDS."""
    try:
        await supervise(*actors)
    except BaseException as error:
        exit_within(EXIT_SECONDS, getattr(error, "exit_code", 1))
        raise
