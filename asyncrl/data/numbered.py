"""A data source of task numbers, for environments that hold their own tasks and select one by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config.checks import NonNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    count: Positive[int]
    """Number of tasks. They come in order, repeated without end."""
    first: NonNegative[int] = 0
    """Number of the first task."""


class Tasks:
    """data.source = "asyncrl.data.numbered:Tasks": rows whose metadata is {"task": N}."""

    Options = TaskOptions

    def __init__(self, options: TaskOptions) -> None:
        self._options = options

    def at(self, position: int) -> dict[str, Any]:
        number = self._options.first + position % self._options.count
        return {"prompt": f"task {number}", "metadata": {"task": number}}
