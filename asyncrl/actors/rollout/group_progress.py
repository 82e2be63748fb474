"""How far one prompt group is: what each call of its samples has sampled, here and in attempts before.

GroupProgress is one attempt at one group. It is cut into segments that go to the bus (partial_rollouts.py), and put
together again from the segments of the attempt before. Every token is in one segment of an attempt; the first segment
also holds everything that the attempt took over.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import CallSegment, GroupSegment, SamplingParams, replace
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import SEGMENTS
from asyncrl.protocols import Bus, Generation, PartialGeneration

Key = tuple[int, int]
"""(sample, call of its rollout function)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What an earlier attempt sampled in one call. prompt_digest: of the tokens that the call continues."""

    prompt_digest: bytes
    generation: Generation


class GroupProgress:
    """The calls of one group: those begun in this attempt, and those recorded before and not asked for again yet."""

    def __init__(
        self,
        group_id: int,
        *,
        attempt: int,
        recorded: Mapping[Key, Recorded] | None = None,
        is_saved: bool = True,
        ticket: str = "",
    ) -> None:
        """ticket: of the group's prompt"""
        self.group_id = group_id
        self._ticket = ticket
        self.is_saved = is_saved
        """What its calls sample is looked at while it grows."""
        self._attempt = attempt
        self._recorded = dict(recorded or {})
        self._begun: dict[Key, tuple[bytes, PartialGeneration]] = {}
        self._saved: dict[Key, int] = {}  # tokens in segments of this attempt
        self._num_segments = 0
        self._num_taken_over = count_tokens(self._recorded)
        self._taken_over: dict[int, int] = {}
        self._is_closed = False
        self._saving = asyncio.Lock()
        self.num_discarded = 0
        """Recorded tokens that were not used: they are sampled anew."""

    @property
    def num_unsaved(self) -> int:
        """Tokens in no segment, of this attempt or of the one that it took over from."""
        if not self._num_segments:
            return max(0, self._num_tokens - self._num_taken_over)
        return self._num_tokens - sum(self._saved.values())

    @property
    def _num_tokens(self) -> int:
        return count_tokens(self._recorded) + sum(partial.num_tokens for _, partial in self._begun.values())

    def begin(self, index: int, call: int, tokens: NDArray[np.int32], sampling: SamplingParams) -> PartialGeneration:
        """Call ``call`` of sample ``index``, with what is recorded of it.

        A rollout function that gets the same answers asks for the same. If it does not, the records of this call and of
        the sample's later ones are thrown away.
        """
        digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
        found = self._recorded.get((index, call))
        partial = PartialGeneration()
        if found is not None and found.prompt_digest == digest and _fits(found.generation, sampling):
            del self._recorded[index, call]
            self._taken_over[index] = self.num_resumed(index) + len(found.generation.tokens)
            partial = PartialGeneration(found.generation)
        else:
            useless = {key: self._recorded.pop(key) for key in list(self._recorded) if key[0] == index}
            self._discard(useless, count_tokens(useless))
        self._begun[index, call] = (digest, partial)
        return partial

    def finish(self, index: int, call: int, generation: Generation) -> None:
        """The call is done."""
        _, partial = self._begun[index, call]
        known = partial.prefix.tokens
        if not np.array_equal(generation.tokens[: len(known)], known):  # an engine that ignores the prefix
            self._discard([(index, call)], len(known))
            self._taken_over[index] -= len(known)
        partial.finish(generation)

    def num_resumed(self, index: int) -> int:
        """Tokens of sample ``index`` that earlier attempts sampled, the first of all that its calls gave."""
        return self._taken_over.get(index, 0)

    def _discard(self, keys: Iterable[Key], num_tokens: int) -> None:
        """The records of these calls are not used; the next segment holds the calls from their first token."""
        self.num_discarded += num_tokens
        self._num_taken_over -= num_tokens
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
            key = _segment_key(self.group_id, self._attempt, self._num_segments)
            proven = replace(segment, proof=_proof(segment, key=key, ticket=self._ticket))
            await bus.put(SEGMENTS, proven, key=key)
            self._num_segments += 1
            for call in calls:
                self._saved[call.index, call.call] = call.start + len(call.tokens)

    def _new_segments(self) -> Iterator[CallSegment]:
        for key, (digest, partial) in self._begun.items():
            yield from self._after_saved(key, digest, partial)
        for key, call in self._recorded.items():
            yield from self._after_saved(key, call.prompt_digest, PartialGeneration(call.generation))

    def _after_saved(self, key: Key, digest: bytes, partial: PartialGeneration) -> Iterator[CallSegment]:
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
                experts=new.experts,
            )

    async def forget(self, bus: Bus) -> None:
        """Remove all segments of the group from the bus, after a save that is under way. Raises BusError."""
        async with self._saving:
            if self._num_segments or self._attempt > 1:
                await bus.forget(SEGMENTS, key=f"{self.group_id}/")

    def close(self) -> None:
        """Nothing more is saved."""
        self._is_closed = True


def assembled(segments: Iterable[GroupSegment]) -> dict[Key, Recorded]:
    """The calls in one attempt's segments, given in order. A segment that starts at 0 replaces what came before."""
    calls: dict[Key, Recorded] = {}
    for segment in segments:
        for new in segment.calls:
            key = (new.index, new.call)
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
                    continue  # no worker of ours writes this
                generation = before.generation.then(generation)
            calls[key] = Recorded(prompt_digest=new.prompt_digest, generation=generation)
    return calls


def newest_attempt(
    found: Mapping[str, GroupSegment], group_id: int, *, before: int, ticket: str = ""
) -> list[GroupSegment]:
    """The segments of the newest attempt below ``before`` that has any, from the first up to the first missing one.

    Those of another worker are none of it: a prompt that the bus lost is published again, and its attempts are counted
    anew while somebody may hold it still. Nor are those of somebody who was not lent the group: they do not fit its
    ``ticket``.
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
    """That who wrote the segment has the ticket, without saying it: everybody on the bus may read segments."""
    if not ticket:
        return ""
    return hmac.digest(bytes.fromhex(ticket), key.encode() + b" " + encode(replace(segment, proof="")), "sha256").hex()


def _is_proven(segment: GroupSegment, *, key: str, ticket: str) -> bool:
    return not ticket or hmac.compare_digest(segment.proof.encode(), _proof(segment, key=key, ticket=ticket).encode())


def _segment_key(group_id: int, attempt: int, number: int) -> str:
    return f"{group_id}/{attempt}/{number}"


def _fits(generation: Generation, sampling: SamplingParams) -> bool:
    """It may be what was asked for: it is finished, or there is room for more."""
    return bool(generation.finish_reason) or len(generation.tokens) < sampling.max_new_tokens
