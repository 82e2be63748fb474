"""Finds prompts that the bus has lost: groups that no process has any more, which would occupy the window forever.

An outstanding group is on ``prompts`` or, once answered, on the log until the learner has read it. A group that is on
neither in two consecutive looks was lost: a stream was deleted or purged, or its server came back with an earlier
state. Its prompt is published again. The streams are listed only while the number of prompts differs from the number of
outstanding groups, or for a while after a log was lost. Prompts of finished groups may stay for good (a server with a
full disk did not remove them); they are counted, so that they do not hide lost prompts.
"""

from __future__ import annotations

import logging

from asyncrl.actors.learner.prompt_link import PromptLink
from asyncrl.bus.port import Bus
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.trust.tickets import Tickets

log = logging.getLogger("asyncrl.learner")

MANY_LOOKS = 10
"""Looks that list both streams after a loss: prompts that came back may hide others that did not."""


class LostPrompts:
    def __init__(self, bus: Bus, *, table: GroupTable, link: PromptLink, tickets: Tickets) -> None:
        self._bus, self._table, self._link, self._tickets = bus, table, link, tickets
        self._suspects: set[int] = set()
        self._left_over = 0
        self._logs_changed, self._looks = table.logs_changed, 0

    def suspect(self) -> None:
        """List both streams for a while: one of them was deleted, purged or replaced."""
        self._looks = MANY_LOOKS

    async def look(self) -> None:
        if self._logs_changed != self._table.logs_changed:
            self._logs_changed, self._looks = self._table.logs_changed, MANY_LOOKS
        self._looks -= 1
        outstanding = set(self._table.outstanding)
        if self._looks < 0 and await self._bus.depth(PROMPTS) == len(outstanding) + self._left_over:
            self._suspects = set()
            return
        asked = await self._bus.keys(PROMPTS)  # read first: a group moves from prompts to trajectories
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
