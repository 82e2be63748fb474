"""Partial rollouts: unfinished groups are saved to the bus, so that a worker that takes them over can resume them.

Every ``seconds`` a worker writes new tokens of each group to ``segments``: what each call of ``generate`` has sampled
since the last save. The segments are removed when the group is published. A worker that gets a prompt which another
worker did not finish replays it: the rollout function runs again, ``generate`` answers finished calls without the
engine, and the engine continues the others.

  P1 A killed worker loses only what it sampled within the last ``seconds``
     (tests/actors/rollout/test_partial_rollouts.py, test_a_worker_killed_in_the_middle_loses_at_most_a_twentieth).
  P2 Sampled tokens keep their logprobs and versions. Tokens that are too old to be trained are discarded, and so are
     tokens of calls that the function does not repeat. The order of the repeated calls does not matter.
  P3 Each attempt writes its own segments, the first with everything it took over: two workers on one group never mix.
  P4 The last attempt starts from nothing: the segments may contain what killed the earlier workers.
  P5 Generation never waits for a save; a group that cannot be saved is reported once.
"""

from __future__ import annotations

import asyncio
import logging
import time

from asyncrl.actors.rollout.group_progress import GroupProgress, Recorded, assembled, count_tokens, newest_attempt
from asyncrl.bus.port import Bus
from asyncrl.errors import BusError, MessageError, MessageTooLarge
from asyncrl.messages import Event, PromptGroup
from asyncrl.messages.topics import EVENTS, PROGRESS, SEGMENTS
from asyncrl.policies.staleness.staleness import is_stale


class PartialRollouts:
    """The unfinished groups of one worker. ``seconds``: interval between saves; 0 saves and resumes nothing."""

    def __init__(self, bus: Bus, *, worker: str, seconds: float, max_attempts: int, max_staleness: int | None) -> None:
        """max_staleness: None means that nothing is too old to be continued"""
        self._bus, self._worker, self._seconds = bus, worker, seconds
        self._max_attempts, self._max_staleness = max_attempts, max_staleness
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

    def begun(self) -> dict[str, int]:
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
        begun    attempt number, as delivery_attempts.py counts, without deliveries that were never begun; None: same
                 as ``attempt``
        """
        progress = GroupProgress(prompt.group_id, attempt=attempt, is_saved=self.is_on, ticket=prompt.ticket)
        if self.is_on and attempt > 1 and (begun or attempt) < self._max_attempts:
            try:
                progress = await self._resumed(prompt.group_id, attempt=attempt, ticket=prompt.ticket)
            except BusError as error:
                self._log.warning("group %d starts over, its segments cannot be read: %s", prompt.group_id, error)
        progress.num_tried = max(progress.num_tried, begun or attempt)
        self._groups[str(prompt.group_id)] = progress
        return progress

    async def _resumed(self, group_id: int, *, attempt: int, ticket: str) -> GroupProgress:
        """Return progress with the calls of those samples that are fresh enough."""
        found = await self._bus.states(SEGMENTS, under=f"{group_id}/")
        segments = newest_attempt(found, group_id, before=attempt, ticket=ticket)
        if not segments:
            return GroupProgress(group_id, attempt=attempt, ticket=ticket)
        calls = assembled(segments)
        learner = (await self._bus.states(PROGRESS)).get("")
        version = 0 if learner is None else learner.policy_version
        stale = {index for (index, *_), call in calls.items() if self._is_stale(call, policy_version=version)}
        fresh = {key: call for key, call in calls.items() if key[0] not in stale}
        resumed, discarded = count_tokens(fresh), count_tokens(calls) - count_tokens(fresh)
        self._log.info("group %d: resumes from %d tokens of %s", group_id, resumed, segments[0].worker)
        data = {"group_id": group_id, "from": segments[0].worker, "tokens": resumed, "too_old_tokens": discarded}
        event = Event(kind="resumed", actor=self._worker, time=time.time(), data=data)
        await self._bus.publish(EVENTS, event, key=f"resumed-{group_id}-{attempt}")
        self.resumed_tokens += resumed
        self.discarded_tokens += discarded
        return GroupProgress(group_id, attempt=attempt, recorded=fresh, ticket=ticket)

    def _is_stale(self, call: Recorded, *, policy_version: int) -> bool:
        """Return whether a call is too old. Versions of a lost history may be older than they say; then the learner
        drops the group."""
        if self._max_staleness is None:
            return False
        oldest = min(span.policy_version for span in call.generation.version_spans)
        return is_stale(oldest, policy_version=policy_version, max_staleness=self._max_staleness)

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
                progress.discard_unasked()
            if (progress := self.close(key)) is not None:
                await progress.forget(self._bus)
        except BusError as error:  # the segments expire after some hours
            self._log.warning("group %s: its segments stay on the bus: %s", key, error)
