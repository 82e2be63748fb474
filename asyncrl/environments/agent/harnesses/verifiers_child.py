"""Play a task of a verifiers environment, in a child (child.py) whose virtual environment has verifiers.

Written against verifiers 0.2.1 (load_environment, run_rollout) and 0.4.0 (verifiers.v1: a taskset, agents, traces). The
harness detects which API is installed. Imports nothing from asyncrl.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Options:
    environment: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Harness:
    def __init__(self, options: Options) -> None:
        is_new = importlib.util.find_spec("verifiers.v1") is not None and not _has_classic()
        self._environment = New(options) if is_new else Classic(options)
        self._numbers = itertools.count()

    async def __call__(self, task: Any, endpoint: Any) -> dict[str, Any]:
        number = task.metadata.get("task")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError('the row does not say which task of the environment it is: its metadata needs {"task": N}')
        with self._key(endpoint.api_key) as variable:
            return await self._environment.play(number, endpoint, variable)

    @contextlib.contextmanager
    def _key(self, key: str) -> Iterator[str]:
        """Put the key into an environment variable, as verifiers requires, and yield the variable's name."""
        variable = f"SAMPLE_KEY_{next(self._numbers)}"
        os.environ[variable] = key
        try:
            yield variable
        finally:
            del os.environ[variable]


def _has_classic() -> bool:
    import verifiers

    return hasattr(verifiers, "load_environment")


class Classic:
    """The API of verifiers 0.2: SingleTurnEnv, MultiTurnEnv, ToolEnv and their subclasses."""

    def __init__(self, options: Options) -> None:
        import verifiers

        self._vf = verifiers
        self._environment = verifiers.load_environment(options.environment, **options.arguments)
        self._rows = self._environment.get_dataset()

    async def play(self, number: int, endpoint: Any, variable: str) -> dict[str, Any]:
        _require(number, len(self._rows))
        client = self._vf.ClientConfig(api_base_url=f"{endpoint.base_url}/v1", api_key_var=variable)
        row = {**self._rows[number], "example_id": number}
        output = await self._environment.run_rollout(row, client, endpoint.model, {})
        if output.get("error"):
            raise RuntimeError(f"the environment failed: {_one_line(output['error'])}") from _cause(output["error"])
        return {
            "reward": output["reward"],
            "metrics": output.get("metrics") or {},
            "finish_reason": "length" if output.get("is_truncated") else "",
        }


class New:
    """The API of verifiers 0.4: the environment's agents play its taskset."""

    def __init__(self, options: Options) -> None:
        import verifiers.v1

        self._vf = verifiers.v1
        settings = options.arguments | {"taskset": {"id": options.environment, **options.arguments.get("taskset", {})}}
        self._environment = self._vf.load_environment(self._vf.resolve_env_config(settings))
        self._tasks = iter(self._environment.taskset.load())
        self._known: list[Any] = []
        self._serving = contextlib.AsyncExitStack()  # open until the process exits
        self._is_serving = False
        self._starting = asyncio.Lock()

    async def play(self, number: int, endpoint: Any, variable: str) -> dict[str, Any]:
        async with self._starting:
            if not self._is_serving:
                await self._serving.enter_async_context(self._environment.serving())
                self._is_serving = True
        while len(self._known) <= number and (more := next(self._tasks, None)) is not None:
            self._known.append(more)
        _require(number, len(self._known))
        client = self._vf.EvalClientConfig(base_url=f"{endpoint.base_url}/v1", api_key_var=variable)
        context = self._vf.ModelContext(model=endpoint.model, client=client)
        began = time.monotonic()
        episode = await self._environment.run_episode(self._known[number], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            problem = _one_line(errors[-1]) if errors else "no trace is complete"
            raise RuntimeError(f"the environment failed: {problem}") from _cause(errors[-1] if errors else None)
        traces = episode.traces
        metrics: dict[str, float] = {"seconds": time.monotonic() - began}
        for trace in traces:
            metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        return {
            "reward": sum(trace.reward for trace in traces) / len(traces),
            "metrics": metrics,
            "finish_reason": "length" if any(trace.is_truncated for trace in traces) else "",
        }


def _require(number: int, count: int) -> None:
    if number >= count:
        raise IndexError(f"the environment has {count} tasks, and the row asks for task {number}")


def _cause(error: Any) -> BaseException | None:
    return error if isinstance(error, BaseException) else None


def _one_line(error: Any) -> str:
    text = getattr(error, "message", None) or (error.get("message") if isinstance(error, dict) else "") or str(error)
    return " ".join(str(text).split())[:300]
