"""Load the Harness of rollout.options.harness, and limit the time of its samples.

A harness is a built-in one by name, or your own as "package.module:Harness". A built-in harness is a class with an
``Options`` in the same module; the worker instantiates it. Your own code never runs in the worker: child processes
import it, possibly in another virtual environment (python_harness.py).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, cast

from asyncrl.config import plugins, tables
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Harness, Outcome, Task
from asyncrl.errors import ConfigError, RolloutError

OnTimeout = Literal["truncate", "fail"]


class Limited:
    """A Harness that wraps another one. It ends in time, with an Outcome or a one-line RolloutError."""

    def __init__(
        self,
        harness: Harness,
        *,
        name: str,
        timeout_seconds: float = 600.0,
        on_timeout: OnTimeout = "fail",
        timeout_reward: float | None = None,
    ) -> None:
        """
        timeout_seconds  limit from the start of a sample to its outcome, including the model's answers; if the harness
                         has ``begun``, an asynchronous context manager that yields the call, time counts once it is
                         entered
        on_timeout       truncate: a sample over the limit has finish_reason "length" and ``timeout_reward``. fail: it
                         fails
        timeout_reward   None leaves the reward to the run's reward function
        """
        self._harness = harness
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._on_timeout = on_timeout
        self._timeout_reward = timeout_reward

    async def __call__(self, task: Task, endpoint: Endpoint) -> Outcome:
        begun = getattr(self._harness, "begun", None)
        if begun is None:
            return await self._run_in_time(functools.partial(self._harness, task, endpoint))
        async with begun(task, endpoint) as play:  # may wait long for a producer, so the limit starts later
            return await self._run_in_time(play)

    async def _run_in_time(self, play: Callable[[], Awaitable[Outcome]]) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_seconds) as timeout:
                return await play()
        except TimeoutError as error:
            if not timeout.expired():
                raise RolloutError(f"harness {self._name}: raised TimeoutError: {error}") from error
        if self._on_timeout == "truncate":
            return Outcome(reward=self._timeout_reward, metrics={"timeout": 1.0}, finish_reason="length")
        limit = f"timeout_seconds = {self._timeout_seconds:g}"
        raise RolloutError(f"harness {self._name}: took longer than {limit} for a sample")

    def check_machine(self) -> None:
        """Raise ConfigError if the harness cannot run on this machine."""
        if (check := getattr(self._harness, "check_machine", None)) is not None:
            check()

    async def close(self) -> None:
        """End everything that the harness has started. Safe to repeat."""
        close = getattr(self._harness, "close", None)
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                await result


_HERE: Final = "asyncrl.environments.agent.harnesses"
HARNESSES: Final = {
    "command": f"{_HERE}.command:CommandHarness",
    "verifiers": f"{_HERE}.verifiers:VerifiersHarness",
    "outside": f"{_HERE}.outside:OutsideHarness",
}


def load_harness(name: str, options: Mapping[str, Any], *, where: str = "rollout.options") -> Harness:
    """Return the harness, ready to be called. Starts no process.

    name     a key of HARNESSES, or "package.module:object" of a function or class that a child imports
    options  [rollout.options.harness_options]: fields of the harness's Options; of PythonHarness's for your own harness
    Raises ConfigError naming a key under ``where``, also if a program or virtual environment is missing.
    """
    kind = plugins.load(_address(name, where), where=f"{where}.harness", table=HARNESSES, kind=type)
    arguments: tuple[Any, ...] = (
        tables.build(sys.modules[kind.__module__].Options, options, f"{where}.harness_options"),
    )
    if name not in HARNESSES:
        arguments = (name, *arguments)
    return cast(Harness, plugins.make(kind, *arguments, where=f"{where}.harness", name=name))


def _address(name: str, where: str) -> str:
    """Return the address of the class that runs the harness."""
    if name in HARNESSES or ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{where}.harness: {name!r} is not an address; write package.module:Harness")
    return f"{_HERE}.python_harness:PythonHarness"
