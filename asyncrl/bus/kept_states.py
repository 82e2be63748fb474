"""Keeps the last state that this process put under each key of the learner's topics, and restores replaced states.

Readers ignore a state that does not decode or that the learner did not sign. But the bus stores one message per key, so
a process that joins later would find only the false state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.bus.encoding import opened
from asyncrl.messages.signing import Signatures
from asyncrl.messages.topics import Topic


class KeptStates:
    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self._states: dict[tuple[str, str], tuple[Topic[Any], bytes]] = {}
        self._turn = asyncio.Lock()

    async def put(self, topic: Topic[Any], key: str, data: bytes, store: Callable[[], Awaitable[None]]) -> None:
        """Put a state on the bus with ``store``. Remember it if its topic is the learner's."""
        if not topic.is_learners:
            await store()
            return
        async with self._turn:  # a restored state must not overwrite a newer one
            self._states[topic.name, key] = (topic, data)
            await store()

    async def forget(self, topic: Topic[Any], key: str, remove: Callable[[], Awaitable[None]]) -> None:
        if not topic.is_learners:
            await remove()
            return
        async with self._turn:
            self._states.pop((topic.name, key), None)
            await remove()

    async def restore(
        self,
        read: Callable[[Topic[Any], str], Awaitable[bytes | None]],
        store: Callable[[Topic[Any], str, bytes], Awaitable[None]],
        *,
        force: bool = False,
    ) -> list[str]:
        """Put back states that were removed, or replaced by one that is older or that readers ignore.

        Return "TOPIC KEY" for each of them.

        read   returns the stored bytes; None for a removed state
        force  also put back states that are unchanged

        A concurrent ``put`` waits only while a state is put back, not during the first check.
        """

        async def stands(topic: Topic[Any], key: str, ours: bytes) -> bool:
            found = await read(topic, key)
            if force and found == ours:
                return False
            if found is None or not self._signatures.supersedes(topic, key, found, ours):
                return False
            return bool(self._signatures.learner) or self._is_as_new(topic, key, found, ours)

        restored: list[str] = []
        for place, kept in list(self._states.items()):
            (topic, ours), (name, key) = kept, place
            if await stands(topic, key, ours):
                continue
            async with self._turn:  # our state may have been in flight, or we may have replaced it
                if self._states.get(place) is kept and not await stands(topic, key, ours):
                    await store(topic, key, ours)
                    restored.append(f"{name} {key}".rstrip())
        return restored

    def _is_as_new(self, topic: Topic[Any], key: str, found: bytes, ours: bytes) -> bool:
        """Without signatures: whether ``found`` is our state, or comes from a newer incarnation of the learner."""
        if found == ours:
            return True
        theirs = opened(found, topic, key=key, signatures=self._signatures).message
        mine = opened(ours, topic, key=key, signatures=self._signatures).message
        return theirs is not None and getattr(theirs, "incarnation", 0) > getattr(mine, "incarnation", -1)
