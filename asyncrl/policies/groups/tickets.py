"""Who may answer a prompt group: the workers to which its prompt was delivered. Pure.

Permissions say who writes in which name, but not about which groups: without tickets, a worker could answer every group
of the window with junk before the workers that they were lent to. So a prompt carries its group's ticket, 128 bits that
only the learner can compute, and the key of an answer contains the ticket. Workers see the prompts delivered to them,
and learn the keys of other workers' answers only after these. So an answer from a sender that never got the prompt does
not count: it fails nothing, and the group stays outstanding. A redelivered or republished prompt has the same ticket:
any worker that got it may answer, and the first answer counts.

Tests: tests/unit/policies/groups/test_tickets.py, tests/integration/security/test_liar.py.
"""

from __future__ import annotations

import hmac

from asyncrl.messages.topics import answer_key, group_id_of

_TICKET_BYTES = 16


class Tickets:
    """The tickets of one run. ``secret`` is the learner's; empty turns tickets off, so any sender may answer."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    def ticket(self, group_id: int) -> str:
        """Return the ticket in the group's prompt; "" in a run without tickets."""
        if not self._secret:
            return ""
        return hmac.digest(self._secret, b"ticket of group %d" % group_id, "sha256")[:_TICKET_BYTES].hex()

    def key(self, group_id: int, *, worker: str) -> str:
        """Return the key under which a worker answers the group."""
        return answer_key(group_id, worker=worker, ticket=self.ticket(group_id))

    def group_answered(self, key: str) -> int | None:
        """Return the group that a key of ``trajectories`` answers; None if it is no such key or the ticket is wrong."""
        group_id = group_id_of(key)
        own = key.rpartition("/")[2]
        if group_id is None or not hmac.compare_digest(own, self.key(group_id, worker="").removeprefix("/")):
            return None
        return group_id
