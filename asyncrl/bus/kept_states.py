"""What a process put last on the learner's topics, to be put again when somebody replaced it by what is not taken.

Readers ignore a state that the learner did not sign, or that is none, but the bus holds one message under a key: who
comes later would find the false one alone.
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
        """``store``: puts it on the bus."""
        if not topic.is_learners:
            await store()
            return
        async with self._turn:  # a state that is put again must not overtake a newer one
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
        anew: bool = False,
    ) -> list[str]:
        """Put again what is there no longer; "TOPIC KEY" of each. ``read``: None for a state that was removed.

        anew  put again also what is there as we put it

        A ``put`` waits for it only where something is put again, not while we look.
        """

        async def stands(topic: Topic[Any], key: str, ours: bytes) -> bool:
            found = await read(topic, key)
            if anew and found == ours:
                return False
            if found is None or not self._signatures.supersedes(topic, key, found, ours):
                return False
            return bool(self._signatures.learner) or self._is_as_new(topic, key, found, ours)

        restored: list[str] = []
        for place, kept in list(self._states.items()):
            (topic, ours), (name, key) = kept, place
            if await stands(topic, key, ours):
                continue
            async with self._turn:  # it may have been on its way, or have been replaced by us
                if self._states.get(place) is kept and not await stands(topic, key, ours):
                    await store(topic, key, ours)
                    restored.append(f"{name} {key}".rstrip())
        return restored

    def _is_as_new(self, topic: Topic[Any], key: str, found: bytes, ours: bytes) -> bool:
        """Where nothing is signed: ours itself, or what a newer incarnation of the learner says."""
        if found == ours:
            return True
        theirs = opened(found, topic, key=key, signatures=self._signatures).message
        mine = opened(ours, topic, key=key, signatures=self._signatures).message
        return theirs is not None and getattr(theirs, "incarnation", 0) > getattr(mine, "incarnation", -1)
