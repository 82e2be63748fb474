"""Replies and errors of a nats-server and JetStream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import BusError, Unanswered

IN_PROCESS: Final = 10158
"""A message with this id is being stored right now."""
LEADERLESS: Final = {10004, 10008, 10009, IN_PROCESS}
"""Errors of a cluster without a leader (during an election, or with too few servers). In order: incomplete results;
temporarily unavailable; no longer the leader; a message stuck while being stored."""
IS_GONE: Final = "not found", "no message found", "stream store EOF"
"""Descriptions of error 10043, and of 10057, which also has other meanings. The last: beyond the end of the stream."""
BUSY: Final = {*LEADERLESS, 10012, 10167}
"""Temporary JetStream errors. Besides LEADERLESS: a consumer's store cannot be created while a consumer of the same
name is being removed; too many requests."""

NO_STREAM: Final = 10059
STREAM_GONE: Final = {NO_STREAM, 10060}
"""The stream does not exist, or another one has its subjects."""

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
    """Return the stream that a request concerns; "" if it concerns none."""
    if "Nats-Expected-Stream" in headers:
        return headers["Nats-Expected-Stream"]
    if (found := _ABOUT_STREAM.match(subject)) is None:
        return ""
    return found[1]


class Busy(BusError):
    """JetStream was temporarily unavailable for a minute. Retrying later may succeed."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        code = int(error.get("err_code", 0))
        remedy = "no quorum: start the other servers of the cluster" if code in LEADERLESS else "the server is busy"
        super().__init__(f"{what}: {remedy} ({error.get('description', '')}, JetStream error {code})")


class Nobody(Unanswered):
    """No responder listens at this subject."""


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
