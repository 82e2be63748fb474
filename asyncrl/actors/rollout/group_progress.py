"""Progress of one prompt group: what each call of its samples has sampled, here and in earlier attempts.

A GroupProgress is one attempt at one group. It is written to the bus in segments (partial_rollouts.py) and restored
from the segments of an earlier attempt. Within an attempt every token is in exactly one segment; the first segment also
contains everything that the attempt took over.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.bus.port import Bus
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.errors import MessageTooLarge
from asyncrl.messages import CallSegment, GroupSegment, SamplingParams, replace
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import SEGMENTS

Key = tuple[int, bytes, int]
"""(sample, digest of the tokens that the call continues, number from 0 among the sample's calls that continue these).

The call's number is not used: concurrent calls may come in another order the next time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Tokens that an earlier attempt sampled in one call."""

    generation: Generation


class GroupProgress:
    """The calls of one group: those begun in this attempt, and recorded ones that were not asked for again yet."""

    def __init__(
        self,
        group_id: int,
        *,
        attempt: int,
        recorded: Mapping[Key, Recorded] | None = None,
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
        self._begun: dict[Key, PartialGeneration] = {}
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
        return count_tokens(self._recorded) + sum(partial.num_tokens for partial in self._begun.values())

    def begin(self, index: int, tokens: NDArray[np.int32], sampling: SamplingParams) -> tuple[Key, PartialGeneration]:
        """Begin a call of sample ``index`` that continues ``tokens``; return its key and recorded tokens.

        A rollout function that gets the same answers makes the same calls, though perhaps in another order. Recorded
        calls that it does not repeat are kept until the group is done and then discarded.
        """
        digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
        key = (index, digest, self._occurrences[index, digest])
        self._occurrences[index, digest] += 1
        partial = PartialGeneration()
        if (found := self._recorded.pop(key, None)) is not None:
            if _fits(found.generation, sampling):
                self._taken_over[index] = self.num_resumed(index) + len(found.generation.tokens)
                partial = PartialGeneration(found.generation)
            else:
                self._discard({key: found})
        self._begun[key] = partial
        return key, partial

    def sampled_from(self, policy_version: int) -> None:
        """Note that a call begins with this version or has tokens of it."""
        oldest = self.oldest_version
        self.oldest_version = policy_version if oldest is None else min(oldest, policy_version)

    def finish(self, key: Key, generation: Generation) -> None:
        """Complete a call."""
        partial = self._begun[key]
        known = partial.prefix
        if not np.array_equal(generation.tokens[: len(known.tokens)], known.tokens):  # the engine ignored the prefix
            self._discard({key: Recorded(generation=known)})
            self._taken_over[key[0]] -= len(known.tokens)
        partial.finish(generation)

    def discard_unasked(self) -> None:
        """Discard recorded calls that were not repeated, once the group is done."""
        self._discard(self._recorded)
        self._recorded = {}

    def num_resumed(self, index: int) -> int:
        """Return how many of the first tokens of sample ``index`` were sampled by earlier attempts."""
        return self._taken_over.get(index, 0)

    def _discard(self, calls: Mapping[Key, Recorded]) -> None:
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
        key = _segment_key(self.group_id, self._attempt, self._num_segments)
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
        for key, partial in self._begun.items():
            yield from self._after_saved(key, partial)
        for key, call in self._recorded.items():
            yield from self._after_saved(key, PartialGeneration(call.generation))

    def _after_saved(self, key: Key, partial: PartialGeneration) -> Iterator[CallSegment]:
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
            )

    async def forget(self, bus: Bus) -> None:
        """Remove all segments of the group from the bus, after a save in progress. Raises BusError."""
        async with self._saving:
            if self._num_segments or self._attempt > 1:
                await bus.forget(SEGMENTS, key=f"{self.group_id}/")

    def close(self) -> None:
        """Save nothing more."""
        self._is_closed = True


def assembled(segments: Iterable[GroupSegment]) -> dict[Key, Recorded]:
    """Return the calls in one attempt's ordered segments. A segment from token 0 replaces earlier ones of its call."""
    calls: dict[Key, Recorded] = {}
    for segment in segments:
        for new in segment.calls:
            key = _key(new)
            generation = Generation(
                tokens=new.tokens,
                logprobs=new.behavior_logprobs,
                version_spans=new.version_spans,
                finish_reason=new.finish_reason,
                experts=new.experts,
            )
            before = calls.get(key)
            if new.start > 0:
                if before is None or len(before.generation.tokens) != new.start:
                    continue  # our workers never write this
                generation = before.generation.then(generation)
            calls[key] = Recorded(generation=generation)
    return calls


def newest_attempt(
    found: Mapping[str, GroupSegment], group_id: int, *, before: int, ticket: str = ""
) -> list[GroupSegment]:
    """Return the segments of the newest attempt below ``before`` that has any, up to the first missing one.

    Segments of a second worker are ignored: a prompt that the bus lost is published again and its attempts are counted
    from 1, while an earlier worker may still hold it. Segments of anyone who did not receive the prompt are ignored as
    well: their proof does not match its ``ticket``.
    """
    found = {key: one for key, one in found.items() if _is_proven(one, key=key, ticket=ticket)}
    for attempt in range(before - 1, 0, -1):
        segments: list[GroupSegment] = []
        while (segment := found.get(_segment_key(group_id, attempt, len(segments)))) is not None:
            if segments and segment.worker != segments[0].worker:
                break
            segments.append(segment)
        if segments:
            return segments
    return []


def count_tokens(calls: Mapping[Key, Recorded]) -> int:
    return sum(len(call.generation.tokens) for call in calls.values())


def _proof(segment: GroupSegment, *, key: str, ticket: str) -> str:
    """Return a proof that the writer knows the ticket, without revealing it: anyone on the bus can read segments."""
    if not ticket:
        return ""
    return hmac.digest(bytes.fromhex(ticket), key.encode() + b" " + encode(replace(segment, proof="")), "sha256").hex()


def _is_proven(segment: GroupSegment, *, key: str, ticket: str) -> bool:
    return not ticket or hmac.compare_digest(segment.proof.encode(), _proof(segment, key=key, ticket=ticket).encode())


def _key(call: CallSegment) -> Key:
    return (call.index, call.prompt_digest, call.call)


def _segment_key(group_id: int, attempt: int, number: int) -> str:
    return f"{group_id}/{attempt}/{number}"


def _fits(generation: Generation, sampling: SamplingParams) -> bool:
    """Return whether a recorded generation can be used: it is finished, or leaves room for more tokens."""
    return bool(generation.finish_reason) or len(generation.tokens) < sampling.max_new_tokens
