"""Issues prompts again that somebody took and does not answer, and clears up behind whoever answers first."""

from __future__ import annotations

import logging
import time

from asyncrl.actors.learner.prompt_link import PromptLink
from asyncrl.messages.topics import PROMPTS
from asyncrl.policies.groups.overdue import Overdue
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.health.faults import REISSUES_LEFT
from asyncrl.protocols import Bus

log = logging.getLogger("asyncrl.learner")


class OverduePrompts:
    """``seconds``: rollout.reissue_seconds"""

    def __init__(self, bus: Bus, *, table: GroupTable, link: PromptLink, seconds: float) -> None:
        self._bus, self._table, self._link = bus, table, link
        self._overdue = Overdue(seconds, next_group_id=table.next_group_id, now=time.monotonic())
        self._reissued: set[int] = set()
        self.num_reissued = 0
        """In this incarnation."""

    def numbers(self) -> dict[str, float]:
        return {"learner/reissued_prompts": self.num_reissued, REISSUES_LEFT: self._overdue.reissues_left}

    async def look(self) -> None:
        """Raises BusError."""
        table = self._table
        due = self._overdue.look(table.outstanding, next_group_id=table.next_group_id, now=time.monotonic())
        if due:
            log.warning(
                "%d prompts were taken and are not answered (groups %s): issued again, the first answer counts "
                "(rollout.reissue_seconds)",
                *(len(due), ", ".join(map(str, due[:5])) + (", ..." if len(due) > 5 else "")),
            )
            self._link.overdue.put_nowait({group_id: table.outstanding[group_id].position for group_id in due})
            self._reissued.update(due)
            self.num_reissued += len(due)
        for group_id in self._reissued - table.outstanding.keys():
            await self._bus.withdraw(PROMPTS, key=str(group_id))  # nobody needs to begin it any more
            self._reissued.discard(group_id)
