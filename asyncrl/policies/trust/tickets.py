"""Who may answer a prompt group: whoever was lent its prompt. Pure.

A prompt carries its group's ticket, 128 bits that only the learner can make, and an answer's key names it. Workers see
the prompts that they are lent, and no key of another's answer. So an answer to a group that its sender was never lent
is nobody's: it takes no place in the log, fails nothing, and the group stays outstanding. A prompt that is redelivered
or published again has the same ticket: whoever was lent it may answer, and the first answer counts.

Tests: tests/unit/policies/trust/test_tickets.py, tests/integration/security/test_liar.py.
"""

from __future__ import annotations

import hmac

from asyncrl.messages.topics import answer_key, group_id_of

_TICKET_BYTES = 16


class Tickets:
    """Of one run. ``secret``: the learner's; empty for a run without: whoever comes first answers."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret

    def of(self, group_id: int) -> str:
        """The ticket that a group's prompt carries; "" in a run without."""
        if not self._secret:
            return ""
        return hmac.digest(self._secret, b"ticket of group %d" % group_id, "sha256")[:_TICKET_BYTES].hex()

    def key(self, group_id: int) -> str:
        """Under which the group is answered."""
        return answer_key(group_id, ticket=self.of(group_id))

    def group_answered(self, key: str) -> int | None:
        """The group that a key of ``trajectories`` answers; None if it is none, or its ticket is another."""
        group_id = group_id_of(key)
        if group_id is None or not hmac.compare_digest(key, self.key(group_id)):
            return None
        return group_id
