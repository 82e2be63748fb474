"""Whether an error of a user's code says that a service is away: connections that fail, time-outs, HTTP 429 and 5xx.

The errors of all clients are known by what they have in common: the errors that caused them, a status, their names.
This file imports only the standard library: processes without asyncrl load it (environments/agent/harnesses/child.py).
Tests: tests/unit/test_outage.py.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

AWAY = "away"
MAYBE = "maybe"
"""A time-out or HTTP 500: it may also be the fault of one answer, such as one that the server cannot grade."""

_AWAY_NAMES = frozenset(
    (
        *("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError", "gaierror"),
        *("IncompleteRead", "BadStatusLine", "RemoteDisconnected"),  # http.client
        *("ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError", "ClientConnectorError"),  # aiohttp
        *("NetworkError", "ConnectError", "ReadError", "RemoteProtocolError"),  # httpx
        *("MaxRetryError", "NewConnectionError", "ChunkedEncodingError"),  # requests
        *("APIConnectionError", "RateLimitError"),  # openai, anthropic
        *("SSLEOFError", "SSLZeroReturnError", "ProxyError", "EndpointConnectionError"),  # ssl, httpx, botocore
        *("ConnectionClosed", "ConnectionClosedError"),  # websockets, botocore
    )
)
"""Classes of errors, by name: clients that are not installed cannot be imported."""
_MAYBE_NAMES = frozenset(
    ("TimeoutError", "Timeout", "TimeoutException", "ReadTimeout", "APITimeoutError", "InternalServerError")
)
_CONNECT_NAMES = frozenset(("ConnectTimeout", "ConnectionTimeoutError"))
"""Time-outs that are not the answer's fault."""
_ERRNOS = frozenset(
    (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNREFUSED)
)
_STATUS_NAMES = frozenset(("HTTPError", "HTTPStatusError", "ClientResponseError", "APIStatusError"))
"""Errors whose text says the status: requests.exceptions.HTTPError: 503 Server Error: ..."""
_LAST_LINE = re.compile(r"(?:\w+\.)*(\w+)(?::|$)")
_TOLD_STATUS = re.compile(r"\b([45]\d\d)\b")
_TOLD_ERRNO = re.compile(r"(?:URLError: <urlopen error |^OSError: )\[Errno (-?\d+)\]")


def is_outage(error: BaseException) -> bool:
    """Return whether ``error``, or what it was raised from, says that a service is away, or may be."""
    return bool(outage_kind(error))


def outage_kind(error: BaseException) -> str:
    """Return AWAY or MAYBE if ``error``, or what it was raised from, says that a service is away; "" if not.

    Example: openai.APIConnectionError from httpx.ConnectError from ConnectionRefusedError. From an
    SSLCertVerificationError it is a mistake: the wrong address, or an authority that this machine does not know.
    """
    chain = list(_chain(error))
    if any("SSLCertVerificationError" in _names_of(one) for one in chain):
        return ""
    for one in chain:
        status = _status(one)
        if status is not None:  # the service answers: what it says counts, whatever the error's name
            return status_kind(status)
        if kind := _connection_kind(one):
            return kind
        if isinstance(group := getattr(one, "exceptions", None), tuple):  # an exception group
            return max(map(outage_kind, group), key=["", MAYBE, AWAY].index, default="")
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, what that was raised from, and so on."""
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        reason = getattr(one, "reason", None)  # urllib's URLError
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        one = reason if one is None and isinstance(reason, BaseException) else one


def status_kind(status: int) -> str:
    """Return the kind of an HTTP status that says that the server cannot answer now, but may answer later."""
    if status in (408, 425, 429, 502, 503, 504) or 520 <= status < 600:
        return AWAY
    return MAYBE if status >= 500 else ""


def line_kind(line: str) -> str:
    """Return the kind of outage that the last line of a Python program's standard error names."""
    found = _LAST_LINE.match(line)
    if found is None:
        return ""
    if found[1] in _STATUS_NAMES:
        status = _TOLD_STATUS.search(line)
        return "" if status is None else status_kind(int(status[1]))
    if number := _TOLD_ERRNO.search(line):  # negative: of a name that cannot be resolved
        return AWAY if int(number[1]) < 0 or int(number[1]) in (*_ERRNOS, errno.ECONNRESET) else ""
    return _name_kind({found[1]})


def _connection_kind(error: BaseException) -> str:
    if isinstance(error, BrokenPipeError):  # a process of one's own that has ended
        return ""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return AWAY
    return _name_kind(_names_of(error))


def _names_of(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _name_kind(names: set[str]) -> str:
    if names & _MAYBE_NAMES and not names & _CONNECT_NAMES:  # many are connection errors as well
        return MAYBE
    return AWAY if names & (_AWAY_NAMES | _CONNECT_NAMES) else ""


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries: its own or that of its response."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    if isinstance(told := getattr(error, "response", None), dict):  # botocore
        value = dict(told.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        return value if isinstance(value, int) and value >= 400 else None
    return None
