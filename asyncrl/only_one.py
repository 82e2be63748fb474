"""One launcher of a run, and one rollout worker of a name: of two, the second to come is told where the first is.

Who is up answers for itself as long as it lives, over the bus (services ``launcher`` and ``workers``). So one that was
killed is gone with its connection, and who is started in its place does not wait for what it left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from asyncrl.errors import ConfigError, Forbidden, NameTaken
from asyncrl.fleet_messages import Claim
from asyncrl.protocols import Asked, Bus
from asyncrl.topics import LAUNCHER, Service, worker_named

ANSWER_SECONDS = 5.0
"""Who is up answers in milliseconds; nobody there is known as fast. One that is frozen, or cut off, is waited for."""

log = logging.getLogger("asyncrl.only_one")


def launcher(bus: Bus, *, run: str) -> contextlib.AbstractAsyncContextManager[None]:
    """Inside, no other `asyncrl run` of this run starts. Raises ConfigError while one is up."""
    mend = "choose another run.name, or end that one first"
    return _alone(bus, LAUNCHER, problem=f"run.name: `asyncrl run` of {run!r} is up on this bus", mend=mend)


def worker(bus: Bus, name: str, *, run: str) -> contextlib.AbstractAsyncContextManager[None]:
    """Inside, no other rollout worker of this name joins the run. Raises NameTaken while one is up."""
    problem = f"--name: a rollout worker {name!r} is up in run {run!r}"
    mend = "give this one another --name, or end that one first"
    return _alone(bus, worker_named(name), problem=problem, mend=mend, kind=NameTaken)


@contextlib.asynccontextmanager
async def _alone(
    bus: Bus, service: Service[Claim, Claim], *, problem: str, mend: str, kind: type[ConfigError] = ConfigError
) -> AsyncIterator[None]:
    ours = Claim(host=socket.gethostname(), pid=os.getpid())
    async with contextlib.AsyncExitStack() as stack:
        answering: list[asyncio.Task[None]] = []
        try:
            async with bus.lease(
                f"{service.name} {service.key}", holder=f"{ours.host} {ours.pid}"
            ):  # one asks at a time
                there = await bus.ask(service, ours, seconds=ANSWER_SECONDS)
                if there is not None:
                    raise kind(f"{problem}: process {there.pid} on {there.host}; {mend}")
                questions = await stack.enter_async_context(bus.serve(service))
            answering = [asyncio.create_task(_answer(questions, ours))]  # cancelled below, on every way out
        except Forbidden as error:
            log.warning(
                "cannot see whether another is up: %s; write the server's roles anew with bin/nats-config", error
            )
        try:
            yield
        finally:
            for task in answering:
                task.cancel()


async def _answer(questions: AsyncIterator[Asked[Claim, Claim]], ours: Claim) -> None:
    """waits for: somebody who would be us"""
    async for asked in questions:
        await asked.answer(ours)
