"""Notices prompts that the bus has lost: groups that nobody has any more, which would keep their place for ever.

A group that is outstanding is on ``prompts`` or, answered, on the log until the learner has read it. One that is in
neither, in two looks one after the other, was lost: a stream was deleted or purged, or its server came back with an
earlier state. Its prompt is published again. The streams are listed only while there are not as many prompts as groups
outstanding, or for a while after a log was lost. Prompts of groups that are done may stay for good (a server whose disk
was full forgot to remove them) and are counted, so that they hide nothing.
"""

from __future__ import annotations

import logging

from asyncrl.actors.learner.prompt_link import PromptLink
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.trust.tickets import Tickets
from asyncrl.protocols import Bus

log = logging.getLogger("asyncrl.learner")

MANY_LOOKS = 10
"""In which prompts that came back hide others that did not."""


class LostPrompts:
    def __init__(self, bus: Bus, *, table: GroupTable, link: PromptLink, tickets: Tickets) -> None:
        self._bus, self._table, self._link, self._tickets = bus, table, link, tickets
        self._suspects: set[int] = set()
        self._left_over = 0
        self._logs_changed, self._looks = table.logs_changed, 0

    def suspect(self) -> None:
        """Somebody deleted, purged or replaced what prompts or trajectories are on: list both for a while."""
        self._looks = MANY_LOOKS

    async def look(self) -> None:
        if self._logs_changed != self._table.logs_changed:
            self._logs_changed, self._looks = self._table.logs_changed, MANY_LOOKS
        self._looks -= 1
        outstanding = set(self._table.outstanding)
        if self._looks < 0 and await self._bus.depth(PROMPTS) == len(outstanding) + self._left_over:
            self._suspects = set()
            return
        asked = await self._bus.keys(PROMPTS)  # this one first: a group moves from prompts to trajectories
        answered = await self._bus.keys(TRAJECTORIES)
        self._left_over = len(asked - {str(group_id) for group_id in outstanding | self._table.outstanding.keys()})
        still = outstanding & self._table.outstanding.keys()
        missing = {i for i in still if str(i) not in asked and self._tickets.key(i) not in answered}
        lost, self._suspects = missing & self._suspects, missing
        if lost:
            log.warning("the bus lost the prompts of %d groups (%s): published again", len(lost), _some(lost))
            self._link.lost.put_nowait({group_id: self._table.outstanding[group_id].position for group_id in lost})
            self._suspects = missing - lost


def _some(group_ids: set[int]) -> str:
    first = ", ".join(map(str, sorted(group_ids)[:5]))
    return first + (", ..." if len(group_ids) > 5 else "")
