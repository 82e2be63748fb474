"""A data source of task numbers, for environments that hold their own tasks and select one by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    count: int
    """Number of tasks. They come in order, repeated without end."""
    first: int = 0
    """Number of the first task."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.first < 0:
            raise ConfigError("count must be >= 1 and first >= 0")


class Tasks:
    """data.source = "asyncrl.data.numbered:Tasks": rows whose metadata is {"task": N}."""

    Options = TaskOptions

    def __init__(self, options: TaskOptions) -> None:
        self._options = options

    def at(self, position: int) -> dict[str, Any]:
        number = self._options.first + position % self._options.count
        return {"prompt": f"task {number}", "metadata": {"task": number}}
