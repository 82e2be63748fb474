"""The server of a frozen model as an actor: its process starts the server, says where it is, and ends when it ends.

Whoever asks the model follows the topic ``servers`` (actors/rollout/server_book.py). A server that dies takes its
process with it, which is restarted like any other process of the run; until then, groups that need it wait for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.actors.base import Actor, until_finished
from asyncrl.bus.port import Bus
from asyncrl.engines.port import HasServerMetrics, ModelServer
from asyncrl.errors import EngineDied, EngineError
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.roles import MODEL_SERVER
from asyncrl.messages.topics import SERVERS
from asyncrl.policies.health.waits import BEAT_SECONDS


class ModelServerActor(Actor):
    """consumes: progress    publishes: servers    waits for: the server's end, the end of the run"""

    role = MODEL_SERVER

    def __init__(self, name: str, bus: Bus, *, server: ModelServer, beat_seconds: float = BEAT_SECONDS) -> None:
        """beat_seconds: how often the server is asked whether it answers, and its address is renewed"""
        super().__init__(name, bus)
        self._server = server
        self._beat_seconds = beat_seconds
        self._address: ServerAddress | None = None

    async def start(self) -> None:
        await self.bus.forget(SERVERS, key=self.name)  # of an earlier start, whose port may be another's now
        with self.waits.waiting("its server", on="start"):
            self._address = await self._server.start()
        self.log.info("serves at %s", self._address.url)

    async def run(self) -> None:
        """Raises EngineDied when the server has ended."""
        over: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self.draining.wait()),
            asyncio.ensure_future(until_finished(self.bus)),
        ]
        ended = asyncio.ensure_future(self._server.wait())
        renewing = asyncio.ensure_future(self._renew())
        tasks = (*over, ended, renewing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise EngineDied(f"server {self.name} has ended: {ended.result()}")
            for task in (*over, renewing):
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        await self._server.close()

    async def server_metrics(self) -> str:
        return await self._server.server_metrics() if isinstance(self._server, HasServerMetrics) else ""

    async def _renew(self) -> None:
        """Renew the address, which expires by itself, as long as the server answers."""
        assert self._address is not None
        while True:
            with self.waits.waiting("an answer of its server", on="engine"):
                # Nothing announces that it recovers. If it does not, the launcher restarts this process.
                while not await self._answers():  # noqa: ASYNC110
                    await asyncio.sleep(self._beat_seconds)
            await self.bus.put(SERVERS, self._address, key=self.name, is_sure=False)
            await asyncio.sleep(self._beat_seconds)

    async def _answers(self) -> bool:
        """Return whether the server answers, and not with an error. Raises EngineDied."""
        try:
            await self._server.answers()
        except EngineDied:
            raise
        except EngineError as error:
            self.problem = str(error)
            return False
        self.problem = ""
        return True
