"""What a nats-server and its JetStream may say to a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import BusError, Unanswered

IN_PROCESS: Final = 10158
"""A message of this id is being stored."""
LEADERLESS: Final = {10004, 10008, 10009, IN_PROCESS}
"""What a cluster says while it elects a leader, or has too few servers to: incomplete results; temporarily unavailable;
no leader any more; a message that is being stored, and never is."""
IS_GONE: Final = "not found", "no message found"  # errors 10043 and 10057, and 10057 is said for other reasons too
BUSY: Final = {*LEADERLESS, 10012, 10167}
"""JetStream errors that pass; besides: a consumer's store not made while one of that name goes; too many requests."""


class Refused(BusError):
    """JetStream's own error answer."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: the bus refuses: {self.description} (JetStream error {self.code})")


class Busy(BusError):
    """JetStream said for a minute that it cannot answer now; later it may. ``code``: its error's."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        code = int(error.get("err_code", 0))
        mend = "no quorum: start the other servers of the cluster" if code in LEADERLESS else "the server is busy"
        super().__init__(f"{what}: {mend} ({error.get('description', '')}, JetStream error {code})")


class Nobody(Unanswered):
    """Nothing takes requests at this subject."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``in_doubt``: it was asked more than once, so the first time may have had its effect."""

    data: bytes
    headers: Mapping[str, str]
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """What JetStream said; ``in_doubt`` as in Answer."""

    found: dict[str, Any]
    in_doubt: bool
