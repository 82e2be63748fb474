"""What a stage is given: a source of prompt groups, and a sink for what becomes of them.

A new use of a worker's engine is one file with a source and a sink, and a Stage made of them where the worker is built.
The training stage's are in training_source.py and training_sink.py; tests/actors/rollout/test_stage.py has small ones.
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
        """None only with a ``problem``."""
        ...

    @property
    def problem(self) -> str:
        """Why the group cannot be made: it is published as failed. Empty: it can."""
        ...

    @property
    def attempt(self) -> int:
        """From 1."""
        ...

    @property
    def is_last_attempt(self) -> bool:
        """An engine that fails now fails the group; else the group is made again."""
        ...

    @property
    def needs_worker_alone(self) -> bool:
        """Nothing else may run on the engine meanwhile."""
        ...

    async def begin(self) -> GroupProgress | None:
        """Called before anything is generated. What earlier attempts sampled; None: nothing is saved of this group."""
        ...

    async def finish(self) -> None:
        """The result is published: nobody needs to make the group again."""
        ...

    async def retry(self) -> None:
        """This attempt failed: somebody (perhaps us) is to make the group again, soon."""
        ...

    async def give_back(self) -> None:
        """It is no attempt: this worker leaves. Somebody else is to make the group."""
        ...

    def close(self) -> None:
        """Always called last, also after a cancel; without ``finish`` the group is still to be made."""
        ...


class Source(Protocol):
    """Where a stage's groups come from."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """Inside, ``next`` may be called. Leaving gives up whatever is not finished."""
        ...

    async def next(self) -> WorkItem | None:
        """The next group, best once the slots have a free one; None when no more will come."""
        ...

    def drain(self) -> None:
        """Hand out nothing more: ``next`` returns None soon. May come before ``open``."""
        ...


class Sink(Protocol):
    """Where a stage's results go."""

    async def publish(self, group: TrajectoryGroup, *, ticket: str) -> None:
        """Returns when the group cannot be lost any more: then the source forgets it. Failed groups come too.

        ticket  of its prompt; "" of one that cannot be read
        """
        ...
