"""Tasks created by user functions: a task that exits fails like one that raises, and does not end the event loop.

asyncio raises SystemExit and KeyboardInterrupt of a task through the loop, past any code that awaits the task.
Tests: tests/actors/rollout/test_rollout_functions.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.config import plugins


def contain_exits() -> None:
    """From now on, contain exits of tasks of the running loop that are made inside ``plugins.contain_exits``."""
    loop = asyncio.get_running_loop()
    made_by = loop.get_task_factory()
    if not isinstance(made_by, _TaskFactory):
        loop.set_task_factory(_TaskFactory(made_by or _plain))


class _TaskFactory:
    """make: the loop's previous factory, or asyncio's own"""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        return self._make(loop, _Contained(coroutine) if plugins.IS_USERS.get() else coroutine, **options)


def _plain(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine whose exits are contained."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        with plugins.contain_exits():
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        with plugins.contain_exits():
            return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return (yield from self._inner.__await__())
