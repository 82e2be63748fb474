"""What a worker has generated so far lies on the bus, so that who takes its prompts over goes on from there.

Every ``seconds`` a worker puts the calls of each group that has grown by GROWTH of its tokens into ``partials``: one
message a group, replaced by the next, gone when the group is published. A worker that gets a prompt whose first worker
did not finish it replays them: its rollout function runs anew, ``generate`` answers what was finished without the
engine, and the engine goes on with the rest.

  P1 a killed worker loses at most GROWTH of a group's tokens and what it generated in ``seconds``
     (tests/test_salvage.py, test_a_worker_killed_in_the_middle_loses_at_most_a_twentieth)
  P2 what was sampled keeps its logprobs and versions; parts that are too old to be trained, or continue something else
     than the function asks for, are thrown away and sampled anew
  P3 the last attempt begins anew: what is in the parts may be what the others died of
  P4 generation waits for none of this; what cannot be saved is said once
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import BusError, MessageError, MessageTooLarge
from asyncrl.messages import Event, PartialCall, PartialGroup, PromptGroup, Sampling
from asyncrl.policies.staleness import is_stale
from asyncrl.protocols import Bus, Generation, Partial
from asyncrl.topics import EVENTS, PARTIALS, PROGRESS

GROWTH: Final = 1 / 32
"""What share of its tokens a group must have grown by to be put on the bus again; each costs at most 32 times 8 B."""

Key = tuple[int, int]
"""(sample, call of its rollout function)."""


class Salvage:
    """All groups of one worker. ``seconds``: between two rounds; 0 salvages nothing."""

    def __init__(self, bus: Bus, *, worker: str, seconds: float, max_attempts: int, max_staleness: int) -> None:
        self._bus, self._worker, self._seconds = bus, worker, seconds
        self._max_attempts, self._max_staleness = max_attempts, max_staleness
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._groups: dict[str, Parts] = {}
        self.salvaged_tokens = 0
        self.discarded_tokens = 0

    @property
    def is_on(self) -> bool:
        return self._seconds > 0

    @property
    def open_groups(self) -> int:
        return len(self._groups)

    @property
    def unsaved_tokens(self) -> int:
        """In progress and not on the bus: what is lost if this process dies now."""
        return sum(parts.num_tokens - parts.num_saved for parts in self._groups.values())

    async def run(self) -> None:
        """consumes: nothing    waits for: the next round    woken by: the clock"""
        while self.is_on:
            await asyncio.sleep(self._seconds)
            await self.save()

    async def save(self) -> None:
        """One round."""
        for parts in list(self._groups.values()):
            try:
                await parts.save(self._bus, worker=self._worker)
            except (MessageTooLarge, MessageError) as error:
                parts.close()
                self._log.warning("group %d is saved no more: %s", parts.group_id, error)
            except BusError as error:
                self._log.warning("group %d: could not save what it has so far: %s", parts.group_id, error)

    async def open(self, prompt: PromptGroup, *, attempt: int) -> Parts:
        """What is known of a group that is begun, and from now on saved."""
        parts = Parts(prompt.group_id)
        if self.is_on and attempt > 1:
            parts.is_on_bus = True
            try:
                group = await self._bus.state(PARTIALS, key=str(prompt.group_id))
                if group is not None and attempt < self._max_attempts:
                    parts = await self._taken_over(group, attempt=attempt)
            except BusError as error:
                self._log.warning("group %d begins anew, its parts cannot be had: %s", prompt.group_id, error)
        self._groups[str(prompt.group_id)] = parts
        return parts

    async def _taken_over(self, group: PartialGroup, *, attempt: int) -> Parts:
        """The calls of the samples that are young enough."""
        progress = await self._bus.state(PROGRESS)
        version = 0 if progress is None else progress.policy_version
        stale = {call.index for call in group.calls if self._is_stale(call, policy_version=version)}
        found = [call for call in group.calls if call.index not in stale]
        salvaged = _count(found)
        discarded = _count(group.calls) - salvaged
        self._log.info("group %d: goes on from %d tokens of %s", group.group_id, salvaged, group.worker)
        data = {"group_id": group.group_id, "from": group.worker, "tokens": salvaged, "too_old_tokens": discarded}
        event = Event(kind="salvaged", actor=self._worker, time=time.time(), data=data)
        await self._bus.publish(EVENTS, event, key=f"salvaged-{group.group_id}-{attempt}")
        self.salvaged_tokens += salvaged
        self.discarded_tokens += discarded
        return Parts(group.group_id, found)

    def _is_stale(self, call: PartialCall, *, policy_version: int) -> bool:
        """Versions of a history that the learner lost may be older than they say; then the learner drops the group."""
        oldest = min(span.policy_version for span in call.version_spans)
        return is_stale(oldest, policy_version=policy_version, max_staleness=self._max_staleness)

    def close(self, key: str) -> Parts | None:
        """The group is not ours any more; what is on the bus stays there for who gets it next."""
        parts = self._groups.pop(key, None)
        if parts is None:
            return None
        parts.close()
        if parts.num_discarded:
            self._log.warning(
                "group %d: its rollout function asked for something else than the first time; %d tokens are lost",
                parts.group_id,
                parts.num_discarded,
            )
        self.salvaged_tokens -= parts.num_discarded
        self.discarded_tokens += parts.num_discarded
        return parts

    async def forget(self, key: str) -> None:
        """The group is published."""
        try:
            if (parts := self.close(key)) is not None:
                await parts.forget(self._bus)
        except BusError as error:  # it goes by itself in some hours
            self._log.warning("group %s: its parts stay on the bus: %s", key, error)


class Parts:
    """The calls of one group: those in progress or done here, and those recorded that were not asked for again yet."""

    def __init__(self, group_id: int, recorded: Iterable[PartialCall] = ()) -> None:
        self.group_id = group_id
        self._recorded: dict[Key, PartialCall] = {(call.index, call.call): call for call in recorded}
        self._begun: dict[Key, tuple[bytes, Partial]] = {}
        self._is_closed = False
        self._saving = asyncio.Lock()
        self.is_on_bus = bool(self._recorded)
        self.num_saved = self.num_tokens
        self.num_discarded = 0

    @property
    def num_tokens(self) -> int:
        return _count(self._recorded.values()) + sum(partial.num_tokens for _, partial in self._begun.values())

    def begin(self, index: int, call: int, tokens: NDArray[np.int32], sampling: Sampling) -> Partial:
        """Call ``call`` of sample ``index``, with what is known of it.

        A rollout function that is given the same answers asks the same. When it does not, what is recorded of this call
        and later ones is thrown away.
        """
        digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
        found = self._recorded.get((index, call))
        partial = Partial()
        if found is not None and found.prompt_digest == digest and _fits(found, sampling):
            del self._recorded[index, call]
            partial = Partial(_generation(found))
        else:
            belied = [key for key in self._recorded if key[0] == index]
            self.num_discarded += _count(self._recorded.pop(key) for key in belied)
        self._begun[index, call] = (digest, partial)
        return partial

    async def save(self, bus: Bus, *, worker: str) -> None:
        """Put it on the bus if that is worth it. Raises BusError."""
        async with self._saving:
            count = self.num_tokens
            if self._is_closed or count - self.num_saved <= GROWTH * self.num_saved:
                return
            group = PartialGroup(group_id=self.group_id, worker=worker, calls=tuple(self._calls()))
            if group.calls:
                self.is_on_bus = True
                await bus.put(PARTIALS, group, key=str(self.group_id))
            self.num_saved = _count(group.calls)

    async def forget(self, bus: Bus) -> None:
        """Take it off the bus, after what is being put there. Raises BusError."""
        async with self._saving:
            if self.is_on_bus:
                await bus.forget(PARTIALS, key=str(self.group_id))

    def _calls(self) -> Iterable[PartialCall]:
        for (index, call), (digest, partial) in self._begun.items():
            generation = partial.so_far()
            if len(generation.tokens):
                yield PartialCall(
                    index=index,
                    call=call,
                    prompt_digest=digest,
                    tokens=generation.tokens,
                    behavior_logprobs=generation.logprobs,
                    version_spans=generation.version_spans,
                    finish_reason=generation.finish_reason,
                )
        yield from self._recorded.values()

    def close(self) -> None:
        self._is_closed = True


def _generation(call: PartialCall) -> Generation:
    return Generation(
        tokens=call.tokens,
        logprobs=call.behavior_logprobs,
        version_spans=call.version_spans,
        finish_reason=call.finish_reason,
    )


def _fits(call: PartialCall, sampling: Sampling) -> bool:
    """It may be what was asked for: done, or with room for more."""
    return bool(call.finish_reason) or len(call.tokens) < sampling.max_new_tokens


def _count(calls: Iterable[PartialCall]) -> int:
    return sum(len(call.tokens) for call in calls)
