"""Which errors of a user's code say that a service is away."""

from __future__ import annotations

import errno
import http.client
import io
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable

import aiohttp
import httpx
import pytest
import requests

from asyncrl.outage import AWAY, MAYBE, is_outage, line_kind, outage_kind


def raised(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def closed_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def status(code: int) -> Callable[[], object]:
    def answer() -> None:
        response = requests.Response()
        response.status_code = code
        response.raise_for_status()

    return answer


def httpx_status(code: int) -> Callable[[], object]:
    return lambda: httpx.Response(code, request=httpx.Request("GET", "http://x")).raise_for_status()


def wrapped() -> None:
    try:
        raise ConnectionRefusedError
    except ConnectionRefusedError:
        raise RuntimeError("no grade")  # noqa: B904 - as users write it


def replaced() -> None:
    try:
        raise ConnectionRefusedError
    except ConnectionRefusedError:
        raise RuntimeError("no grade") from None


def url_error(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://x", code, "", http.client.HTTPMessage(), io.BytesIO())


URL = f"http://127.0.0.1:{closed_port()}/"


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        raised(lambda: urllib.request.urlopen(URL)),
        raised(lambda: requests.get(URL, timeout=5)),
        raised(lambda: httpx.get(URL)),
        raised(status(503)),
        raised(status(429)),
        raised(httpx_status(500)),
        url_error(502),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        httpx.ProxyError("503 Service Unavailable"),
        type("EndpointConnectionError", (Exception,), {})("of botocore"),
        type("ClientError", (Exception,), {"response": {"ResponseMetadata": {"HTTPStatusCode": 503}}})("of botocore"),
        type("ConnectionClosedError", (Exception,), {})("of websockets"),
        http.client.RemoteDisconnected("closed"),
        raised(wrapped),
        ExceptionGroup("of a TaskGroup", [ValueError(), ConnectionResetError()]),
    ],
    ids=repr,
)
def test_a_service_that_is_away_is_known_by_every_client(error: BaseException) -> None:
    assert is_outage(error)


def untrusted() -> None:
    """As aiohttp, httpx and requests do."""
    try:
        raise ssl.SSLCertVerificationError(1, "self-signed certificate")
    except ssl.SSLError as error:
        raise requests.ConnectionError("of a client") from error


class Several(Exception):
    """Of a client that tried nothing."""

    exceptions = ()


@pytest.mark.parametrize(
    "error",
    [
        IndexError("list index out of range"),
        KeyError("rewards"),
        FileNotFoundError(errno.ENOENT, "no such file"),
        BrokenPipeError(),
        Several(),
        subprocess.TimeoutExpired("tool", 5),
        ssl.SSLCertVerificationError(1, "self-signed certificate"),
        raised(status(404)),
        raised(status(401)),
        raised(httpx_status(400)),
        url_error(403),
        raised(lambda: urllib.request.urlopen("foo://x")),
        raised(replaced),
        raised(untrusted),
    ],
    ids=repr,
)
def test_a_mistake_is_no_outage(error: BaseException) -> None:
    assert not is_outage(error)


def test_a_time_out_and_a_500_may_be_the_answers_own_fault() -> None:
    assert {outage_kind(error) for error in (TimeoutError(), raised(httpx_status(500)), httpx.ReadTimeout(""))} == {
        MAYBE
    }
    kinds = {outage_kind(error) for error in (ConnectionResetError(), raised(status(503)), httpx.ConnectTimeout(""))}
    assert kinds == {AWAY}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='judge', port=80): Max retries", AWAY),
        ("openai.APIConnectionError: Connection error.", AWAY),
        ("ConnectionRefusedError: [Errno 111] Connection refused", AWAY),
        ("TimeoutError", MAYBE),
        ("httpx.ReadTimeout: timed out", MAYBE),
        ("ModuleNotFoundError: No module named 'ConnectionError'", ""),
        ("ValueError: ConnectionError: said the model", ""),
        ("urllib.error.URLError: <urlopen error [Errno 111] Connection refused>", AWAY),
        ("urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>", AWAY),
        ("urllib.error.HTTPError: HTTP Error 503: Service Unavailable", AWAY),
        ("urllib.error.HTTPError: HTTP Error 404: Not Found", ""),
        ("requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: http://judge", AWAY),
        ("httpx.HTTPStatusError: Server error '500 Internal Server Error' for url 'http://judge'", MAYBE),
        ("aiohttp.client_exceptions.ClientResponseError: 429, message='', url='http://judge'", AWAY),
        ("openai.APIStatusError: Error code: 401 - 500 tokens", ""),
        ("OSError: [Errno 101] Network is unreachable", AWAY),
        ("OSError: [Errno 28] No space left on device", ""),
        ("all is well", ""),
        ("", ""),
    ],
)
def test_the_last_line_of_a_program_names_its_outage(line: str, expected: str) -> None:
    assert line_kind(line) == expected
