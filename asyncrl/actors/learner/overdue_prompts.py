"""Issues prompts again that were taken but not answered, and removes the extra prompt once a group is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from asyncrl.actors.learner.prompt_link import OverduePrompt, PromptLink
from asyncrl.bus.port import Bus
from asyncrl.errors import BusError
from asyncrl.messages.topics import ACTORS, PROMPTS
from asyncrl.policies.groups.overdue import KEPT, REISSUES_LEFT, Overdue, all_wait_for_prompts
from asyncrl.policies.groups.table import GroupTable

log = logging.getLogger("asyncrl.learner")

_WITHDRAWALS: Final = 2
"""Withdrawals per reissued prompt of a finished group, one per look: the prompt source may just be issuing it."""


class OverduePrompts:
    """seconds: rollout.reissue_seconds"""

    def __init__(
        self,
        bus: Bus,
        *,
        table: GroupTable,
        link: PromptLink,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._table, self._link, self._clock = bus, table, link, clock
        self._overdue = Overdue(seconds, next_group_id=table.next_group_id, now=clock())
        self._reissued: dict[int, int] = {}  # group id -> withdrawals left
        self.num_reissued = 0
        """Prompts reissued in this incarnation."""

    def numbers(self) -> dict[str, float]:
        return {
            "learner/reissued_prompts": self.num_reissued,
            REISSUES_LEFT: self._overdue.reissues_left,
            KEPT: self._overdue.num_kept,
        }

    async def look(self) -> None:
        """Look once: reissue overdue prompts and withdraw those of finished groups. Raises BusError."""
        table = self._table
        self._overdue.look(table.outstanding, next_group_id=table.next_group_id, now=self._clock())
        if self._overdue.is_quiet:
            beats = await self._bus.states(ACTORS)
            all_wait = all_wait_for_prompts(beats.values())
            undelivered = await self._bus.undelivered(PROMPTS) if all_wait else 0
            due = self._overdue.due(all_wait=all_wait, undelivered=undelivered)
            self._issue_again([group_id for group_id in due if group_id in table.outstanding])
        for group_id in self._reissued.keys() - table.outstanding.keys():
            try:
                await self._bus.withdraw(PROMPTS, key=str(group_id))  # its group is done
            except BusError as error:  # a full disk allows no removals
                log.warning("group %d: its second prompt cannot be removed yet: %s", group_id, error)
                return
            self._reissued[group_id] -= 1
            if not self._reissued[group_id]:
                del self._reissued[group_id]

    def _issue_again(self, group_ids: list[int]) -> None:
        if not group_ids:
            return
        takers = " by the clients that took them, which send no heartbeat" if self._overdue.num_kept else ""
        log.warning(
            "%d prompts are not answered%s (groups %s): issued again; the first answer counts"
            " (rollout.reissue_seconds)",
            *(len(group_ids), takers, ", ".join(map(str, group_ids[:5])) + (", ..." if len(group_ids) > 5 else "")),
        )
        prompts = self._table.outstanding
        self._link.overdue.put_nowait(
            [
                OverduePrompt(
                    group_id=group_id,
                    position=prompts[group_id].position,
                    oldest_start=prompts[group_id].oldest_start,
                )
                for group_id in group_ids
            ]
        )
        self._reissued.update(dict.fromkeys(group_ids, _WITHDRAWALS))
        self.num_reissued += len(group_ids)
