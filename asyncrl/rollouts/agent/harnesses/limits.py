"""How long a harness may take for a sample, and what becomes of one that takes longer.

Tests: tests/unit/rollouts/harnesses/test_limits.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError, RolloutError
from asyncrl.rollouts.agent.harnesses.protocol import Endpoint, Harness, Outcome, Task

OnTimeout = Literal["truncate", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    timeout_seconds  from the start of a sample to its outcome, answers of the model included; for a harness with
                     ``begun``, an asynchronous context that yields the call, from when that is entered
    on_timeout       of a sample that takes longer. truncate: what it sampled is trained, with finish_reason "length"
                     and ``timeout_reward``. fail: it fails, with the reason
    timeout_reward   None leaves it to the run's reward function
    """

    timeout_seconds: float = 600.0
    on_timeout: OnTimeout = "truncate"
    timeout_reward: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be > 0, got {self.timeout_seconds:g}")
        if self.on_timeout == "fail" and self.timeout_reward is not None:
            raise ConfigError('timeout_reward is for on_timeout = "truncate"; a sample that fails has none')


class Limited:
    """A Harness around another: it ends in time, with an Outcome or a RolloutError of one line."""

    def __init__(self, harness: Harness, *, name: str, limits: Limits) -> None:
        self._harness, self._name, self._limits = harness, name, limits

    async def __call__(
        self, task: Task, endpoint: Endpoint, *, check: Callable[[Outcome], None] = lambda outcome: None
    ) -> Outcome:
        """check: raises RolloutError for an outcome that the sample cannot have; for a harness that can ask again"""
        begun = getattr(self._harness, "begun", None)
        if begun is None:
            return await self._timed(functools.partial(self._harness, task, endpoint))
        async with begun(task, endpoint, check) as play:  # nobody may be there to play it yet
            return await self._timed(play)

    async def _timed(self, play: Callable[[], Awaitable[Outcome]]) -> Outcome:
        try:
            async with asyncio.timeout(self._limits.timeout_seconds) as timeout:
                return await play()
        except TimeoutError as error:
            if not timeout.expired():
                raise RolloutError(f"harness {self._name}: raised TimeoutError: {error}") from error
        if self._limits.on_timeout == "truncate":
            return Outcome(reward=self._limits.timeout_reward, metrics={"timeout": 1.0}, finish_reason="length")
        limit = f"timeout_seconds = {self._limits.timeout_seconds:g}"
        raise RolloutError(f"harness {self._name}: took longer than {limit} for a sample")

    def check_machine(self) -> None:
        """Raises ConfigError for what could play nothing here."""
        if (check := getattr(self._harness, "check_machine", None)) is not None:
            check()

    async def close(self) -> None:
        """End what the harness has started; again is harmless."""
        close = getattr(self._harness, "close", None)
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                await result
