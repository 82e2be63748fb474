"""Partial rollouts: unfinished groups are saved to the bus, so that a worker that takes them over can resume them.

Every ``seconds`` a worker writes new tokens of each group to ``segments``: what each call of ``generate`` has sampled
since the last save. The segments are removed when the group is published. A worker that gets a prompt which another
worker did not finish replays it: the rollout function runs again, ``generate`` answers finished calls without the
engine, and the engine continues the others.

  P1 A killed worker loses only what it sampled within the last ``seconds``
     (tests/actors/rollout/test_partial_rollouts.py, test_a_worker_killed_in_the_middle_loses_at_most_a_twentieth).
  P2 Sampled tokens keep their logprobs and versions. Tokens that are too old to be trained, or that the model cannot
     have sampled, are discarded, and so are tokens of calls that the function does not repeat. The order of the
     repeated calls does not matter.
  P3 Each attempt writes its own segments, the first with everything it took over: two workers on one group never mix.
     Nobody writes under another worker's name, and only who was lent the group can prove it (``_proof``): a worker
     cannot save invented tokens of a group for whoever takes it over (test_saved_segments.py).
  P4 The last attempt starts from nothing: the segments may contain what killed the earlier workers.
  P5 Generation never waits for a save; a group that cannot be saved is reported once.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.bus.port import Bus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.errors import BusError, MessageError, MessageTooLarge
from asyncrl.messages import CallSegment, Event, GroupSegment, PromptGroup, SamplingParams, replace
from asyncrl.messages.codec import encode
from asyncrl.messages.images import ImageRef
from asyncrl.messages.topics import EVENTS, PROGRESS, SEGMENTS
from asyncrl.policies.groups.validation import LEAST_LOGPROB
from asyncrl.policies.staleness.staleness import is_stale


class PartialRollouts:
    """The unfinished groups of one worker. ``seconds``: interval between saves; 0 saves and resumes nothing."""

    def __init__(
        self,
        bus: Bus,
        *,
        worker: str,
        seconds: float,
        max_attempts: int,
        max_staleness: int | None = None,
        vocabulary_size: int = 2**31,
    ) -> None:
        """
        max_attempts     a group that was begun this often without a result fails
        max_staleness    None: nothing is too old to be continued
        vocabulary_size  of this worker's engine
        """
        self._bus = bus
        self._worker = worker
        self._seconds = seconds
        self.max_attempts = max_attempts
        self._max_staleness = max_staleness
        self._vocabulary_size = vocabulary_size
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._groups: dict[str, GroupProgress] = {}
        self.resumed_tokens = 0
        self.discarded_tokens = 0

    @property
    def is_on(self) -> bool:
        return self._seconds > 0

    @property
    def unsaved_tokens(self) -> int:
        """Tokens in progress that are not on the bus: lost if this process dies now."""
        return sum(progress.num_unsaved for progress in self._groups.values())

    def begun_versions(self) -> dict[str, int]:
        """Return Heartbeat.begun: group id -> oldest policy version."""
        versions = {key: progress.oldest_version for key, progress in self._groups.items()}
        return {key: version for key, version in versions.items() if version is not None}

    def numbers(self) -> dict[str, float]:
        return {
            "rollout/resumed_tokens": self.resumed_tokens,
            "rollout/discarded_tokens": self.discarded_tokens,
            "rollout/unsaved_tokens": self.unsaved_tokens,
        }

    async def run(self) -> None:
        """consumes: nothing    waits for: the next save    woken by: the clock"""
        while self.is_on:
            await asyncio.sleep(self._seconds)
            await self.save()

    async def save(self) -> None:
        """Save all groups in parallel: over a slow link, one round trip after the other would take too long."""
        async with asyncio.TaskGroup() as group:
            for progress in list(self._groups.values()):
                group.create_task(self._save(progress))

    async def _save(self, progress: GroupProgress) -> None:
        try:
            await progress.save(self._bus, worker=self._worker)
        except (MessageTooLarge, MessageError) as error:
            progress.close()
            self._log.warning("group %d is no longer saved: %s", progress.group_id, error)
        except BusError as error:
            self._log.warning("group %d: could not save its partial rollouts: %s", progress.group_id, error)

    async def open(self, prompt: PromptGroup, *, attempt: int, begun: int | None = None) -> GroupProgress:
        """Open the progress of a group that begins here, with the saved tokens of earlier attempts.

        attempt  delivery number, as the bus counts
        begun    attempt number, as DeliveryAttempts counts, without deliveries that were never begun; None: same
                 as ``attempt``
        """
        progress = GroupProgress(prompt.group_id, attempt=attempt, is_saved=self.is_on, ticket=prompt.ticket)
        if self.is_on and attempt > 1 and (begun or attempt) < self.max_attempts:
            try:
                progress = await self._resume(prompt.group_id, attempt=attempt, ticket=prompt.ticket)
            except BusError as error:
                self._log.warning("group %d starts over, its segments cannot be read: %s", prompt.group_id, error)
        progress.num_tried = max(progress.num_tried, begun or attempt)
        self._groups[str(prompt.group_id)] = progress
        return progress

    async def _resume(self, group_id: int, *, attempt: int, ticket: str) -> GroupProgress:
        """Return progress with the calls of those samples that are fresh enough, and that the model can have said."""
        found = await self._bus.states(SEGMENTS, under=f"*/{group_id}/")
        segments = newest_attempt(found, group_id, before=attempt, ticket=ticket)
        if not segments:
            return GroupProgress(group_id, attempt=attempt, ticket=ticket)
        calls = assemble_calls(segments)
        learner = (await self._bus.states(PROGRESS)).get("")
        version = 0 if learner is None else learner.policy_version
        unfit = {
            index
            for (index, *_), call in calls.items()
            if self._is_stale(call, policy_version=version) or not self._is_possible(call)
        }
        fresh = {key: call for key, call in calls.items() if key[0] not in unfit}
        resumed, discarded = count_tokens(fresh), count_tokens(calls) - count_tokens(fresh)
        self._log.info("group %d: resumes from %d tokens of %s", group_id, resumed, segments[0].worker)
        data = {"group_id": group_id, "from": segments[0].worker, "tokens": resumed, "too_old_tokens": discarded}
        event = Event(kind="resumed", actor=self._worker, time=time.time(), data=data)
        await self._bus.publish(EVENTS, event, key=f"{self._worker}/resumed-{group_id}-{attempt}")
        self.resumed_tokens += resumed
        self.discarded_tokens += discarded
        return GroupProgress(group_id, attempt=attempt, recorded=fresh, ticket=ticket)

    def _is_stale(self, call: Generation, *, policy_version: int) -> bool:
        """Return whether a call is too old. Rolled-back versions may be older than they say; then the learner
        drops the group."""
        if self._max_staleness is None:
            return False
        oldest = min(span.policy_version for span in call.version_spans)
        return is_stale(oldest, policy_version=policy_version, max_staleness=self._max_staleness)

    def _is_possible(self, call: Generation) -> bool:
        """Return whether the worker's model can have sampled a call: who saved it may have another model, or lie."""
        low, high = int(call.tokens.min()), int(call.tokens.max())
        return low >= 0 and high < self._vocabulary_size and float(call.logprobs.min()) >= LEAST_LOGPROB

    def close(self, key: str) -> GroupProgress | None:
        """Close a group that this worker no longer makes; its segments stay on the bus for the next worker."""
        progress = self._groups.pop(key, None)
        if progress is None:
            return None
        progress.close()
        if progress.num_discarded:
            self._log.warning(
                "group %d: its rollout function made other requests than on the first attempt, or its engine ignored "
                "the saved tokens; %d tokens are lost",
                progress.group_id,
                progress.num_discarded,
            )
        self.resumed_tokens -= progress.num_discarded
        self.discarded_tokens += progress.num_discarded
        return progress

    async def forget(self, key: str) -> None:
        """Remove the segments of a published group."""
        try:
            if (progress := self._groups.get(key)) is not None:
                progress.discard_unused()
            if (progress := self.close(key)) is not None:
                await progress.forget(self._bus, worker=self._worker)
        except BusError as error:  # the segments expire after some hours
            self._log.warning("group %s: its segments stay on the bus: %s", key, error)


Key = tuple[int, bytes, int]
"""(sample, digest of the tokens and images that the call continues, number from 0 among the sample's calls that
continue these).

The call's number is not used: concurrent calls may come in another order the next time."""


class GroupProgress:
    """One attempt at one group: the calls begun in it, and recorded ones that were not asked for again yet.

    Within an attempt every token is in exactly one segment; the first segment also contains everything that the attempt
    took over.
    """

    def __init__(
        self,
        group_id: int,
        *,
        attempt: int,
        recorded: Mapping[Key, Generation] | None = None,
        is_saved: bool = True,
        ticket: str = "",
    ) -> None:
        """ticket: ticket of the group's prompt"""
        self.group_id = group_id
        self._ticket = ticket
        self.is_saved = is_saved
        """Whether generations are observed while they grow, so that they can be saved."""
        self._attempt = attempt
        self.num_tried = 2 if recorded else 1
        """How often the group's rollout function was run, including this time, as far as is known."""
        self._recorded = dict(recorded or {})
        self._calls: dict[Key, PartialGeneration] = {}
        self._occurrences: Counter[tuple[int, bytes]] = Counter()
        self._saved: dict[Key, int] = {}  # number of tokens in segments of this attempt
        self._num_segments = 0
        self._num_taken_over = count_tokens(self._recorded)
        self._taken_over: dict[int, int] = {}
        self._is_closed = False
        self._saving = asyncio.Lock()
        self.oldest_version: int | None = None
        """Policy version of the oldest token of calls begun so far; None: no call has begun."""
        self.num_discarded = 0
        """Recorded tokens that were not used and are sampled again."""

    @property
    def num_unsaved(self) -> int:
        """Tokens that are in no segment of this attempt or of the attempt it took over from."""
        if not self._num_segments:
            return max(0, self._num_tokens - self._num_taken_over)
        return self._num_tokens - sum(self._saved.values())

    @property
    def _num_tokens(self) -> int:
        return count_tokens(self._recorded) + sum(partial.num_tokens for partial in self._calls.values())

    def rewind(self, index: int) -> None:
        """The rollout function of sample ``index`` runs from its start: answer its calls from what was sampled."""
        for key in [key for key in self._calls if key[0] == index]:
            if (partial := self._calls.pop(key)).num_tokens:
                self._recorded[key] = partial.so_far(0)
        self._occurrences = Counter({of: count for of, count in self._occurrences.items() if of[0] != index})
        self._taken_over.pop(index, None)

    def begin(
        self, index: int, tokens: NDArray[np.int32], sampling: SamplingParams, *, images: Sequence[ImageRef] = ()
    ) -> tuple[Key, PartialGeneration]:
        """Begin a call of sample ``index`` that continues ``tokens``; return its key and recorded tokens.

        A rollout function that gets the same answers makes the same calls, though perhaps in another order. Recorded
        calls that it does not repeat are kept until the group is done and then discarded.
        """
        said = np.ascontiguousarray(tokens, np.int32).tobytes()
        digest = hashlib.sha256(said + "".join(f"{one.start} {one.digest}" for one in images).encode()).digest()
        key = (index, digest, self._occurrences[index, digest])
        self._occurrences[index, digest] += 1
        partial = PartialGeneration()
        if (found := self._recorded.pop(key, None)) is not None:
            if _fits(found, sampling):
                self._taken_over[index] = self.num_resumed(index) + len(found.tokens)
                partial = PartialGeneration(found)
            else:
                self._discard({key: found})
        self._calls[key] = partial
        return key, partial

    def note_version(self, policy_version: int) -> None:
        """Note that a call begins with this version or has tokens of it."""
        oldest = self.oldest_version
        self.oldest_version = policy_version if oldest is None else min(oldest, policy_version)

    def finish(self, key: Key, partial: PartialGeneration, generation: Generation) -> None:
        """Complete a call, unless the rollout function has run again since (``rewind``) and left it behind."""
        if self._calls.get(key) is not partial:
            return
        known = partial.prefix
        if not np.array_equal(generation.tokens[: len(known.tokens)], known.tokens):  # the engine ignored the prefix
            self._discard({key: known})
            self._taken_over[key[0]] -= len(known.tokens)
        partial.finish(generation)

    def discard_unused(self) -> None:
        """Discard recorded calls that were not repeated, once the group is done."""
        self._discard(self._recorded)
        self._recorded = {}

    def num_resumed(self, index: int) -> int:
        """Return how many of the first tokens of sample ``index`` were sampled by earlier attempts."""
        return self._taken_over.get(index, 0)

    def _discard(self, calls: Mapping[Key, Generation]) -> None:
        """Discard the records of these calls. The next segment contains the calls from their first token."""
        num_tokens = count_tokens(calls)
        self.num_discarded += num_tokens
        self._num_taken_over -= num_tokens
        for key in calls:
            self._saved.pop(key, None)

    async def save(self, bus: Bus, *, worker: str) -> None:
        """Write new tokens to a segment, or to several if they exceed one message. Raises BusError."""
        async with self._saving:
            if self._is_closed or self.num_unsaved <= 0:
                return
            calls = tuple(self._new_segments())
            if calls:
                await self._put(bus, calls, worker=worker)

    async def _put(self, bus: Bus, calls: tuple[CallSegment, ...], *, worker: str) -> None:
        """Write one segment. Raises MessageTooLarge if a single call does not fit into a message."""
        segment = GroupSegment(group_id=self.group_id, worker=worker, calls=calls)
        key = _segment_key(worker, self.group_id, self._attempt, self._num_segments)
        proven = replace(segment, proof=_proof(segment, key=key, ticket=self._ticket))
        try:
            await bus.put(SEGMENTS, proven, key=key)
        except MessageTooLarge:
            if len(calls) == 1:
                raise
            middle = len(calls) // 2
            await self._put(bus, calls[:middle], worker=worker)
            await self._put(bus, calls[middle:], worker=worker)
            return
        self._num_segments += 1
        for call in calls:
            self._saved[_key(call)] = call.start + len(call.tokens)

    def _new_segments(self) -> Iterator[CallSegment]:
        for key, partial in self._calls.items():
            yield from self._unsaved_segments(key, partial)
        for key, call in self._recorded.items():
            yield from self._unsaved_segments(key, PartialGeneration(call))

    def _unsaved_segments(self, key: Key, partial: PartialGeneration) -> Iterator[CallSegment]:
        start = self._saved.get(key, 0)
        if partial.num_tokens <= start:
            return
        new = partial.so_far(start)
        if len(new.tokens):
            yield CallSegment(
                index=key[0],
                prompt_digest=key[1],
                call=key[2],
                start=start,
                tokens=new.tokens,
                behavior_logprobs=new.logprobs,
                version_spans=new.version_spans,
                finish_reason=new.finish_reason,
                experts=new.experts,
                support=new.support,
                likeliest=new.likeliest,
            )

    async def forget(self, bus: Bus, *, worker: str) -> None:
        """Remove our segments of the group from the bus, after a save in progress; those of others expire.

        Raises BusError.
        """
        async with self._saving:
            if self._num_segments or self._attempt > 1:
                await bus.forget(SEGMENTS, key=f"{worker}/{self.group_id}/")

    def close(self) -> None:
        """Save nothing more."""
        self._is_closed = True


def assemble_calls(segments: Iterable[GroupSegment]) -> dict[Key, Generation]:
    """Return the calls in one attempt's ordered segments. A segment from token 0 replaces earlier ones of its call."""
    calls: dict[Key, Generation] = {}
    for segment in segments:
        for new in segment.calls:
            key = _key(new)
            generation = Generation(
                tokens=new.tokens,
                logprobs=new.behavior_logprobs,
                version_spans=new.version_spans,
                finish_reason=new.finish_reason,
                experts=new.experts,
                support=new.support,
                likeliest=new.likeliest,
            )
            before = calls.get(key)
            if new.start > 0:
                if before is None or len(before.tokens) != new.start:
                    continue  # our workers never write this
                generation = before.then(generation)
            calls[key] = generation
    return calls


def newest_attempt(
    found: Mapping[str, GroupSegment], group_id: int, *, before: int, ticket: str = ""
) -> list[GroupSegment]:
    """Return the segments of the newest attempt below ``before`` that has any, up to the first missing one.

    Two workers may have made the same attempt: a prompt that the bus lost is published again and its attempts are
    counted from 1, while an earlier worker may still hold it. Then the one with more segments counts. Segments of
    anyone who did not receive the prompt are ignored: their proof does not match its ``ticket``.
    """
    found = {key: one for key, one in found.items() if _is_proven(one, key=key, ticket=ticket)}
    workers = sorted({segment.worker for segment in found.values()})
    for attempt in range(before - 1, 0, -1):
        longest: list[GroupSegment] = []
        for worker in workers:
            segments: list[GroupSegment] = []
            while (segment := found.get(_segment_key(worker, group_id, attempt, len(segments)))) is not None:
                segments.append(segment)
            longest = max(longest, segments, key=len)
        if longest:
            return longest
    return []


def count_tokens(calls: Mapping[Key, Generation]) -> int:
    return sum(len(call.tokens) for call in calls.values())


def _proof(segment: GroupSegment, *, key: str, ticket: str) -> str:
    """Return a proof that the writer knows the ticket, without revealing it: anyone on the bus can read segments."""
    if not ticket:
        return ""
    return hmac.digest(bytes.fromhex(ticket), key.encode() + b" " + encode(replace(segment, proof="")), "sha256").hex()


def _is_proven(segment: GroupSegment, *, key: str, ticket: str) -> bool:
    return not ticket or hmac.compare_digest(segment.proof.encode(), _proof(segment, key=key, ticket=ticket).encode())


def _key(call: CallSegment) -> Key:
    return (call.index, call.prompt_digest, call.call)


def _segment_key(worker: str, group_id: int, attempt: int, number: int) -> str:
    return f"{worker}/{group_id}/{attempt}/{number}"


def _fits(generation: Generation, sampling: SamplingParams) -> bool:
    """Return whether a recorded generation can be used: it is finished, or leaves room for more tokens."""
    return bool(generation.finish_reason) or len(generation.tokens) < sampling.max_new_tokens
