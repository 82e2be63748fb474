"""Allows one launcher per run and one rollout worker per name. A second one is told where the first is.

While it is up, the first one answers requests on the bus (services ``launcher`` and ``workers``). A killed process
disappears with its connection, so its replacement does not have to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from asyncrl.bus.port import Bus, Request
from asyncrl.errors import ConfigError, leaves
from asyncrl.messages.control import Claim
from asyncrl.messages.topics import LAUNCHER, Service, worker_named

ANSWER_SECONDS = 5.0
"""A running instance answers in milliseconds, and the absence of one is detected as fast. The limit applies to a frozen
instance."""


def launcher(bus: Bus, *, run: str) -> contextlib.AbstractAsyncContextManager[None]:
    """In this context, no other `asyncrl run` of this run can start. Raises ConfigError while one is up."""
    remedy = "choose another run.name, or end that one first"
    one_at_a_time = bus.lease("launcher", holder=f"{socket.gethostname()} {os.getpid()}")
    problem = f"run.name: `asyncrl run` of {run!r} is up on this bus"
    return _claim(bus, LAUNCHER, one_at_a_time=one_at_a_time, problem=problem, remedy=remedy)


def worker(bus: Bus, name: str, *, run: str) -> contextlib.AbstractAsyncContextManager[None]:
    """In this context, no other rollout worker of this name can join the run. Raises ConfigError while one is up."""
    problem = f"--name: a rollout worker {name!r} is up in run {run!r}"
    remedy = "give this one another --name, or end that one first"
    nothing = contextlib.nullcontext()  # any worker could hold a lease of this name for ever
    return _claim(bus, worker_named(name), one_at_a_time=nothing, problem=problem, remedy=remedy)


@contextlib.asynccontextmanager
async def _claim(
    bus: Bus,
    service: Service[Claim, Claim],
    *,
    one_at_a_time: contextlib.AbstractAsyncContextManager[None],
    problem: str,
    remedy: str,
) -> AsyncIterator[None]:
    ours = Claim(host=socket.gethostname(), pid=os.getpid())
    async with contextlib.AsyncExitStack() as stack:
        # Of several that start at the same time, one asks and begins to serve; then the others ask, and hear of it.
        async with one_at_a_time:
            if (there := await bus.ask(service, ours, seconds=ANSWER_SECONDS)) is not None:
                raise ConfigError(f"{problem}: process {there.pid} on {there.host}; {remedy}")
            questions = await stack.enter_async_context(bus.serve(service))
        try:
            # ends the process if it can no longer answer, because it may not be alone
            async with asyncio.TaskGroup() as group:
                answering = group.create_task(_answer(questions, ours), name=f"answer-{service.name}")
                yield
                answering.cancel()
        except ExceptionGroup as error:
            raise leaves(error)[0] from None  # the caller's error, not part of a group


async def _answer(questions: AsyncIterator[Request[Claim, Claim]], ours: Claim) -> None:
    """waits for: another process that claims the same place"""
    async for asked in questions:
        await asked.answer(ours)
