"""Ports of a stage: a source of prompt groups, and a sink for the results.

A new use of a worker's engine is one file with a source and a sink, combined in a Stage where the worker is built.
Training has training_source.py and training_sink.py; tests/actors/rollout/test_stage.py has small examples.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from asyncrl.actors.rollout.group_progress import GroupProgress
from asyncrl.messages import PromptGroup, TrajectoryGroup


class WorkItem(Protocol):
    """One prompt group that a source has handed out."""

    @property
    def group_id(self) -> int: ...

    @property
    def prompt(self) -> PromptGroup | None:
        """The prompt; None only if there is a ``problem``."""
        ...

    @property
    def problem(self) -> str:
        """Why the group cannot be made and is published as failed; "" if it can."""
        ...

    @property
    def attempt(self) -> int:
        """Attempt number, from 1."""
        ...

    @property
    def is_last_attempt(self) -> bool:
        """Whether an engine failure now fails the group; otherwise the group is made again."""
        ...

    @property
    def needs_worker_alone(self) -> bool:
        """Whether nothing else may run on the engine while this group does."""
        ...

    async def begin(self) -> GroupProgress | None:
        """Called before anything is generated. Return the group's progress so far; None: nothing of it is saved."""
        ...

    async def finish(self) -> None:
        """The result is published, so the group need not be made again."""
        ...

    async def retry(self) -> None:
        """This attempt failed: any worker may make the group again soon."""
        ...

    async def give_back(self) -> None:
        """This worker leaves: another one should make the group, and this does not count as an attempt."""
        ...

    def close(self) -> None:
        """Always called last, even after a cancel. Without ``finish`` the group must still be made."""
        ...


class Source(Protocol):
    """Supplies a stage's groups."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """While open, ``next`` may be called. Leaving abandons everything unfinished."""
        ...

    async def next(self) -> WorkItem | None:
        """Return the next group, preferably once a slot is free; None if no more will come."""
        ...

    def drain(self) -> None:
        """Hand out nothing more: ``next`` returns None soon. May be called before ``open``."""
        ...


class Sink(Protocol):
    """Receives a stage's results."""

    async def publish(self, group: TrajectoryGroup, *, ticket: str) -> None:
        """Publish a group, even a failed one. Return once it cannot be lost any more; the source then forgets it.

        ticket  ticket of its prompt; "" if the prompt could not be read
        """
        ...
