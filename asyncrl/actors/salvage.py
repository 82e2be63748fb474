"""What a worker has generated so far lies on the bus, so that who takes its prompts over goes on from there.

Every ``seconds`` a worker puts what is new of each group into ``segments``: what each call of ``generate`` has sampled
since the segment before. They are removed when the group is published. A worker that gets a prompt that others did not
finish replays it: its rollout function runs anew, ``generate`` answers what was finished without the engine, and the
engine goes on with the rest.

  P1 a killed worker loses what it generated in ``seconds``, and no more
     (tests/test_salvage.py, test_a_worker_killed_in_the_middle_loses_at_most_a_twentieth)
  P2 what was sampled keeps its logprobs and versions; what is too old to be trained, or continues something else than
     the function asks for, is thrown away and sampled anew
  P3 each attempt writes segments of its own, the first with all it took over: two workers at one group do not mix
  P4 the last attempt begins anew: what is in the segments may be what the others died of
  P5 generation waits for none of this; what cannot be saved is said once
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import BusError, MessageError, MessageTooLarge
from asyncrl.messages import CallSegment, Event, GroupSegment, PromptGroup, Sampling
from asyncrl.policies.staleness import is_stale
from asyncrl.protocols import Bus, Generation, Partial
from asyncrl.topics import EVENTS, PROGRESS, SEGMENTS

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
        return sum(parts.num_unsaved for parts in self._groups.values())

    async def run(self) -> None:
        """consumes: nothing    waits for: the next round    woken by: the clock"""
        while self.is_on:
            await asyncio.sleep(self._seconds)
            await self.save()

    async def save(self) -> None:
        """One round: all groups side by side, as far away a round trip each would make it many times as long."""
        async with asyncio.TaskGroup() as group:
            for parts in list(self._groups.values()):
                group.create_task(self._save(parts))

    async def _save(self, parts: Parts) -> None:
        try:
            await parts.save(self._bus, worker=self._worker)
        except (MessageTooLarge, MessageError) as error:
            parts.close()
            self._log.warning("group %d is saved no more: %s", parts.group_id, error)
        except BusError as error:
            self._log.warning("group %d: could not save what it has so far: %s", parts.group_id, error)

    async def open(self, prompt: PromptGroup, *, attempt: int, begun: int | None = None) -> Parts:
        """What is known of a group that is begun, and from now on saved.

        attempt  as the bus counts: which delivery it is
        begun    as attempts.py counts: without those that nobody began; ``attempt`` where nobody counted
        """
        parts = Parts(prompt.group_id, attempt=attempt)
        if self.is_on and attempt > 1 and (begun or attempt) < self._max_attempts:
            try:
                parts = await self._taken_over(prompt.group_id, attempt=attempt)
            except BusError as error:
                self._log.warning("group %d begins anew, its segments cannot be had: %s", prompt.group_id, error)
        self._groups[str(prompt.group_id)] = parts
        return parts

    async def _taken_over(self, group_id: int, *, attempt: int) -> Parts:
        """The calls of the samples that are young enough."""
        segments = _newest_attempt(await self._bus.states(SEGMENTS, under=f"{group_id}/"), group_id, before=attempt)
        if not segments:
            return Parts(group_id, attempt=attempt)
        calls = assembled(segments)
        progress = (await self._bus.states(PROGRESS)).get("")
        version = 0 if progress is None else progress.policy_version
        stale = {index for (index, _), call in calls.items() if self._is_stale(call, policy_version=version)}
        young = {key: call for key, call in calls.items() if key[0] not in stale}
        salvaged, discarded = _count(young), _count(calls) - _count(young)
        self._log.info("group %d: goes on from %d tokens of %s", group_id, salvaged, segments[0].worker)
        data = {"group_id": group_id, "from": segments[0].worker, "tokens": salvaged, "too_old_tokens": discarded}
        event = Event(kind="salvaged", actor=self._worker, time=time.time(), data=data)
        await self._bus.publish(EVENTS, event, key=f"salvaged-{group_id}-{attempt}")
        self.salvaged_tokens += salvaged
        self.discarded_tokens += discarded
        return Parts(group_id, attempt=attempt, recorded=young)

    def _is_stale(self, call: Recorded, *, policy_version: int) -> bool:
        """Versions of a history that the learner lost may be older than they say; then the learner drops the group."""
        oldest = min(span.policy_version for span in call.generation.version_spans)
        return is_stale(oldest, policy_version=policy_version, max_staleness=self._max_staleness)

    def close(self, key: str) -> Parts | None:
        """The group is not ours any more; what is on the bus stays there for who gets it next."""
        parts = self._groups.pop(key, None)
        if parts is None:
            return None
        parts.close()
        if parts.num_discarded:
            self._log.warning(
                "group %d: its rollout function asked for something else than the first time, or its engine went on "
                "from nothing; %d tokens are lost",
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
        except BusError as error:  # they go by themselves in some hours
            self._log.warning("group %s: its segments stay on the bus: %s", key, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What others had of one call."""

    prompt_digest: bytes
    generation: Generation


class Parts:
    """The calls of one group: those in progress or done here, and those recorded that were not asked for again yet."""

    def __init__(self, group_id: int, *, attempt: int, recorded: Mapping[Key, Recorded] | None = None) -> None:
        self.group_id = group_id
        self._attempt = attempt
        self._recorded = dict(recorded or {})
        self._begun: dict[Key, tuple[bytes, Partial]] = {}
        self._saved: dict[Key, int] = {}  # tokens in segments of this attempt
        self._num_segments = 0
        self._num_salvaged = _count(self._recorded)
        self._is_closed = False
        self._saving = asyncio.Lock()
        self.num_discarded = 0

    @property
    def num_unsaved(self) -> int:
        """Tokens in no segment, of this attempt or of the one that it took over from."""
        if not self._num_segments:
            return max(0, self._num_tokens - self._num_salvaged)
        return self._num_tokens - sum(self._saved.values())

    @property
    def _num_tokens(self) -> int:
        return _count(self._recorded) + sum(partial.num_tokens for _, partial in self._begun.values())

    def begin(self, index: int, call: int, tokens: NDArray[np.int32], sampling: Sampling) -> Partial:
        """Call ``call`` of sample ``index``, with what is known of it.

        A rollout function that is given the same answers asks the same. When it does not, what is recorded of this call
        and later ones is thrown away.
        """
        digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
        found = self._recorded.get((index, call))
        partial = Partial()
        if found is not None and found.prompt_digest == digest and _fits(found.generation, sampling):
            del self._recorded[index, call]
            partial = Partial(found.generation)
        else:
            belied = {key: self._recorded.pop(key) for key in list(self._recorded) if key[0] == index}
            self._discard(belied, _count(belied))
        self._begun[index, call] = (digest, partial)
        return partial

    def finish(self, index: int, call: int, generation: Generation) -> None:
        """The call is done."""
        _, partial = self._begun[index, call]
        known = partial.prefix.tokens
        if not np.array_equal(generation.tokens[: len(known)], known):  # an engine that begins anew
            self._discard([(index, call)], len(known))
        partial.finish(generation)

    def _discard(self, keys: Iterable[Key], num_tokens: int) -> None:
        """What is recorded of these calls is not used; the next segment has them from the start."""
        self.num_discarded += num_tokens
        self._num_salvaged -= num_tokens
        for key in keys:
            self._saved.pop(key, None)

    async def save(self, bus: Bus, *, worker: str) -> None:
        """Put what is new into a segment. Raises BusError."""
        async with self._saving:
            if self._is_closed or self.num_unsaved <= 0:
                return
            calls = tuple(self._new_segments())
            if not calls:
                return
            segment = GroupSegment(group_id=self.group_id, worker=worker, calls=calls)
            await bus.put(SEGMENTS, segment, key=_segment_key(self.group_id, self._attempt, self._num_segments))
            self._num_segments += 1
            for call in calls:
                self._saved[call.index, call.call] = call.start + len(call.tokens)

    def _new_segments(self) -> Iterator[CallSegment]:
        for key, (digest, partial) in self._begun.items():
            yield from self._after_saved(key, digest, partial)
        for key, call in self._recorded.items():
            yield from self._after_saved(key, call.prompt_digest, Partial(call.generation))

    def _after_saved(self, key: Key, digest: bytes, partial: Partial) -> Iterator[CallSegment]:
        start = self._saved.get(key, 0)
        if partial.num_tokens <= start:
            return
        new = partial.so_far(start)
        if len(new.tokens):
            yield CallSegment(
                index=key[0],
                call=key[1],
                prompt_digest=digest,
                start=start,
                tokens=new.tokens,
                behavior_logprobs=new.logprobs,
                version_spans=new.version_spans,
                finish_reason=new.finish_reason,
            )

    async def forget(self, bus: Bus) -> None:
        """Take all segments of the group off the bus, after the one that is being put there. Raises BusError."""
        async with self._saving:
            if self._num_segments or self._attempt > 1:
                await bus.forget(SEGMENTS, key=f"{self.group_id}/")

    def close(self) -> None:
        self._is_closed = True


def assembled(segments: Iterable[GroupSegment]) -> dict[Key, Recorded]:
    """The calls that one attempt's segments hold, in their order. One that starts at 0 replaces what was before it."""
    calls: dict[Key, Recorded] = {}
    for segment in segments:
        for new in segment.calls:
            key = (new.index, new.call)
            generation = Generation(
                tokens=new.tokens,
                logprobs=new.behavior_logprobs,
                version_spans=new.version_spans,
                finish_reason=new.finish_reason,
            )
            before = calls.get(key)
            if new.start > 0:
                if before is None or len(before.generation.tokens) != new.start:
                    continue  # no worker of ours writes this
                generation = before.generation.then(generation)
            calls[key] = Recorded(prompt_digest=new.prompt_digest, generation=generation)
    return calls


def _segment_key(group_id: int, attempt: int, number: int) -> str:
    return f"{group_id}/{attempt}/{number}"


def _newest_attempt(found: Mapping[str, GroupSegment], group_id: int, *, before: int) -> list[GroupSegment]:
    """The segments from 0 up to the first that is missing, of the newest attempt that has any."""
    for attempt in range(before - 1, 0, -1):
        segments: list[GroupSegment] = []
        while (segment := found.get(_segment_key(group_id, attempt, len(segments)))) is not None:
            segments.append(segment)
        if segments:
            return segments
    return []


def _fits(generation: Generation, sampling: Sampling) -> bool:
    """It may be what was asked for: done, or with room for more."""
    return bool(generation.finish_reason) or len(generation.tokens) < sampling.max_new_tokens


def _count(calls: Mapping[Key, Recorded]) -> int:
    return sum(len(call.generation.tokens) for call in calls.values())
