"""Replies and errors of a nats-server and JetStream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import BusError, Unanswered

IN_PROCESS: Final = 10158
"""A message with this id is being stored."""
LEADERLESS: Final = {10004, 10008, 10009, IN_PROCESS}
"""Errors of a cluster without a leader (election, or too few servers): incomplete results; temporarily unavailable; no
longer leader; a message stuck being stored."""
IS_GONE: Final = "not found", "no message found", "stream store EOF"
"""Descriptions of errors 10043 and 10057 (which has other meanings too); the last: the stream never had so many."""
BUSY: Final = {*LEADERLESS, 10012, 10167}
"""Temporary JetStream errors: also a consumer's store that cannot be created while one of that name is being removed,
and too many requests."""

NO_STREAM: Final = 10059
STREAM_GONE: Final = {NO_STREAM, 10054, 10060, 10109}
"""No such stream; one that takes no message of ours, as somebody altered it: too large, of another stream's name,
sealed."""

_ABOUT_STREAM: Final = re.compile(
    r"\$JS\.API\.(?:STREAM\.(?:MSG\.)?[A-Z]+|DIRECT\.GET|CONSUMER\.(?:MSG\.)?[A-Z]+)\.([^.]+)"
)


class Refused(BusError):
    """An error reply from JetStream."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: the bus refuses: {self.description} (JetStream error {self.code})")


def stream_of(subject: str, headers: Mapping[str, str]) -> str:
    """The stream that a request is about; "" for one that is about none."""
    if "Nats-Expected-Stream" in headers:
        return headers["Nats-Expected-Stream"]
    if (found := _ABOUT_STREAM.match(subject)) is None:
        return ""
    return found[1]


class Busy(BusError):
    """JetStream was temporarily unavailable for a minute; retrying later may succeed. ``code``: its error code."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        code = int(error.get("err_code", 0))
        remedy = "no quorum: start the other servers of the cluster" if code in LEADERLESS else "the server is busy"
        super().__init__(f"{what}: {remedy} ({error.get('description', '')}, JetStream error {code})")


class Nobody(Unanswered):
    """No responders at this subject."""


@dataclass(frozen=True, slots=True)
class Reply:
    """``in_doubt``: the request was sent more than once, so an earlier attempt may have taken effect."""

    data: bytes
    headers: Mapping[str, str]
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class PublishAck:
    """JetStream's reply to a stored message; ``in_doubt`` as in Reply."""

    found: dict[str, Any]
    in_doubt: bool
