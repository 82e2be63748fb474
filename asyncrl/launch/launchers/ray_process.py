"""A process on a Ray cluster, as reported by its actor (launch/launchers/process_agent.py). Only ray.py imports ray."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Final, Protocol

from asyncrl.launch.launchers.process_agent import OutputChunk, Started

_AWAY_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0


class Launches(Protocol):
    """The part of the launcher that a process needs.  errors: Ray's exceptions"""

    errors: Any

    def kill(self, actor: Any) -> None: ...

    def has_ended(self, name: str) -> None: ...

    def print(self, name: str, news: OutputChunk) -> None: ...

    def say(self, text: str) -> None: ...


class RayProcess:
    """One start of a process. Prints its output with its name before each line."""

    def __init__(self, actor: Any, launcher: Launches, *, name: str, started: Started) -> None:
        self._actor, self._launcher, self._name = actor, launcher, name
        self.pid, self.node = started.pid, started.host
        self._seen = 0
        self._code: int | None = None
        self._reading = asyncio.Lock()

    async def ended(self) -> int:
        async with self._reading:
            while self._code is None:
                if (code := await self._next()) is not None:
                    self._code = code
                    self._launcher.has_ended(self._name)
        return self._code

    def signal(self, number: int) -> None:
        if self._code is None:
            self._actor.signal.remote(number)
            if number == signal.SIGKILL:  # also kill the actor from here, in case its machine does not answer
                asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._launcher.kill, self._actor)

    async def _next(self) -> int | None:
        try:
            news: OutputChunk = await self._actor.news.remote(self._seen)
        except self._launcher.errors.ActorUnavailableError:
            await asyncio.sleep(_AWAY_SECONDS)  # network trouble, or an end that Ray has not noticed yet: ask again
            return None
        except self._launcher.errors.RayError as error:
            self._launcher.say(f"{self._name}: its actor is gone: {in_a_line(error)}")
            self._launcher.kill(self._actor)  # the old process must not run next to the new one
            return -signal.SIGKILL
        self._launcher.print(self._name, news)
        self._seen = news.last
        if news.code is not None:
            self._launcher.kill(self._actor)
        return news.code


def in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
