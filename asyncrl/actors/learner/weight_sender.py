"""Answers engines' requests for the newest weights and sends them from the learner's memory during the next step."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from asyncrl.actors.base import Actor
from asyncrl.bus.port import Bus, Request
from asyncrl.errors import WeightsError
from asyncrl.messages.topics import ACTORS, TRANSFERS
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest
from asyncrl.weights.port import Sender


class WeightSender(Actor):
    """consumes: weight requests    waits for: an engine's request    woken by: a weight follower"""

    role = "weight-sender"

    def __init__(self, name: str, bus: Bus, *, sender: Sender) -> None:
        super().__init__(name, bus)
        self._sender = sender

    async def run(self) -> None:
        async with self.bus.serve(TRANSFERS) as requests, asyncio.TaskGroup() as group:
            async for request in requests:
                group.create_task(self._answer(request), name=f"{self.name}.{request.question.engine}")

    async def _answer(self, request: Request[TransferRequest, TransferOffer]) -> None:
        asked = request.question
        try:
            transfer = await asyncio.to_thread(self._sender.begin, asked)
        except WeightsError as error:
            await request.answer(TransferOffer(problem=str(error)))
            return
        await request.answer(transfer.offer)
        if not asked.has_joined:  # a joining engine: also drop engines that are gone
            await asyncio.to_thread(self._sender.forget, engines=set(await self.bus.states(ACTORS)))
        try:
            await _in_daemon_thread(transfer.send, name=f"send-{asked.engine}")
        except WeightsError as error:
            self.log.warning("weights of version %d to %s: %s", transfer.offer.policy_version, asked.engine, error)


async def _in_daemon_thread(function: Callable[[], None], *, name: str) -> None:
    """Run in a daemon thread: if an engine dies, a collective may never return, and the exit must not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        problem: Exception | None = None
        try:
            function()
        except Exception as error:  # re-raised in the awaiting task
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(settle, problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    await done
