"""Refused requests, and checks of request fields. Each dialect writes a refusal in its own format."""

from __future__ import annotations

from typing import Any, Final

Json = dict[str, Any]

LONGEST: Final = 200


class Refused(Exception):
    """A request that cannot be served.

    status  HTTP status
    code    OpenAI's error code, which clients look at
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def table(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise Refused(f"{what} must be an object, got {short(value)}")
    return value


def rows(value: Any, what: str) -> list[Any]:
    """Return the list ``value``; an empty list for None."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Refused(f"{what} must be a list, got {short(value)}")
    return value


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{what} must be text, got {short(value)}")
    return value


def whole(value: Any, what: str, *, low: int, high: int = 2**31 - 1) -> int | None:
    """Return the whole number ``value`` within [low, high], or None for None."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refused(f"{what} must be a whole number from {low} to {high}, got {short(value)}")
    return value


def short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + "..."
