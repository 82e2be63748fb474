"""Whether an error of a user's code says that a service is away: connections that fail, time-outs, HTTP 429 and 5xx.

The errors of all clients are known by what they have in common: the errors that caused them, a status, their names.
This file imports only the standard library: processes without asyncrl load it (environments/agent/harnesses/child.py).
Tests: tests/unit/test_outage.py.
"""

from __future__ import annotations

import errno
import re

NAMES = frozenset(
    (
        *("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError"),
        *("TimeoutError", "Timeout", "TimeoutException", "ConnectTimeout", "ReadTimeout", "gaierror"),
        *("IncompleteRead", "BadStatusLine", "RemoteDisconnected"),  # http.client
        *("ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError", "ClientConnectorError"),  # aiohttp
        *("NetworkError", "ConnectError", "ReadError", "RemoteProtocolError"),  # httpx
        *("MaxRetryError", "NewConnectionError", "ChunkedEncodingError"),  # requests
        *("APIConnectionError", "APITimeoutError", "InternalServerError", "RateLimitError"),  # openai, anthropic
    )
)
"""Classes of errors, by name: clients that are not installed cannot be imported."""
_ERRNOS = frozenset(
    (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNREFUSED)
)
_LAST_LINE = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")


def is_outage(error: BaseException) -> bool:
    """Return whether ``error``, or what it was raised from, says that a service is away.

    Example: openai.APIConnectionError from httpx.ConnectError from ConnectionRefusedError.
    """
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        status = _status(one)
        if status is not None:  # the service answers: what it says counts, whatever the error's name
            return is_away(status)
        if _is_connection(one):
            return True
        if isinstance(group := getattr(one, "exceptions", None), tuple):  # an exception group
            return any(map(is_outage, group))
        reason = getattr(one, "reason", None)  # urllib's URLError
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        one = reason if one is None and isinstance(reason, BaseException) else one
    return False


def is_away(status: int) -> bool:
    """Return whether an HTTP status says that the server cannot answer now, but may answer later."""
    return status in (408, 425, 429) or 500 <= status < 600


def names_outage(line: str) -> bool:
    """Return whether the last line of a Python program's standard error names the error of a service that is away."""
    found = _LAST_LINE.match(line)
    return found is not None and found[1] in NAMES


def _is_connection(error: BaseException) -> bool:
    if isinstance(error, BrokenPipeError):  # a process of one's own that has ended
        return False
    is_unreachable = isinstance(error, OSError) and error.errno in _ERRNOS
    return is_unreachable or any(kind.__name__ in NAMES for kind in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries: its own or that of its response."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None
