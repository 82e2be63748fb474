"""What a nats-server and its JetStream may say to a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import BusError


class Refused(BusError):
    """JetStream's own error answer."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: the bus refuses: {self.description} (JetStream error {self.code})")


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
