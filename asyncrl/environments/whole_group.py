"""Makes a RolloutFn of a function that makes all samples of a group together.

    class Together:
        makes_groups = True

        async def __call__(self, prompt, generates):      # one ``generate`` for each sample
            ...
            return rollouts                               # one trajectory, or list of parts, for each sample, in order

A worker calls it for many groups at once, and a class is made once per worker: it may hold prompts back, let answers of
several groups meet, or schedule its calls of ``generate`` as it likes. A group is done when its call returns.

Each sample of a group calls the RolloutFn as usual. The last one to come calls the user's function; the others wait for
their part of what it returns, or for its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl.environments.port import Generate
from asyncrl.messages import PromptGroup, Trajectory


class GroupRolloutFn(Protocol):
    """Makes all rollouts of one prompt."""

    async def __call__(
        self, prompt: PromptGroup, generates: Sequence[Generate]
    ) -> Sequence[Trajectory | Sequence[Trajectory]]: ...


class WholeGroup:
    """The RolloutFn of a function that makes whole groups. It limits no time: the samples wait for each other."""

    has_harness = True

    def __init__(self, function: GroupRolloutFn) -> None:
        self._function = function
        self._joining: dict[tuple[str, int, int], dict[int, tuple[Generate, asyncio.Future[Any]]]] = {}
        """(data set, group, attempt) -> sample -> its ``generate``, and what it waits for"""

    async def __call__(
        self, prompt: PromptGroup, generate: Generate, *, index: int
    ) -> Trajectory | Sequence[Trajectory]:
        key = (prompt.dataset, prompt.group_id, generate.attempt)
        joined = self._joining.setdefault(key, {})
        mine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        joined[index] = generate, mine
        try:
            if len(joined) == prompt.group_size:
                del self._joining[key]  # a sample that runs again after an outage waits for all others to do so
                await self._make(prompt, joined)
            made: Trajectory | Sequence[Trajectory] = await mine
            return made
        finally:
            if self._joining.get(key) is joined:
                joined.pop(index, None)
                if not joined:
                    del self._joining[key]

    async def _make(self, prompt: PromptGroup, joined: dict[int, tuple[Generate, asyncio.Future[Any]]]) -> None:
        """Call the user's function and give each sample its rollout, or all of them the error."""
        waiting = [joined[index] for index in sorted(joined)]
        try:
            made = await self._function(prompt, [generate for generate, _ in waiting])
            if not isinstance(made, list | tuple) or len(made) != len(waiting):
                raise ValueError(f"it must return a list with a rollout for each of {len(waiting)} samples")
        except BaseException as error:
            for _, one in waiting:
                if not one.done():
                    one.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
                    one.exception()  # it is raised below; a sample that was cancelled never looks
            raise
        for (_, one), rollout in zip(waiting, made, strict=True):
            if not one.done():
                one.set_result(rollout)

    async def close(self) -> None:
        """Close the user's object, if it has anything to close."""
        closed = getattr(self._function, "close", lambda: None)()
        if asyncio.iscoroutine(closed):
            await closed
