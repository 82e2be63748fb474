"""HTTP requests to one SGLang server.

Each generation opens a new connection, because a kept-alive connection that the server is closing looks like a dead
server. Orders, the control requests of a load, reuse connections to a server that we launched: a busy server is slow to
accept new connections, and everything waits for a load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

from asyncrl.engines.sglang.server import ServerProcess
from asyncrl.errors import EngineDied, EngineError

_READ_BYTES = 2**20
_ABORT_SECONDS = 5.0
_CONNECT_SECONDS = 60.0
_KEPT_SECONDS = 2.0
"""Keep-alive of connections for orders. Shorter than the five seconds after which the server closes idle ones."""


class ServerClient:
    """Sends requests. They raise EngineError on an error status or a timeout, EngineDied when the server is gone."""

    def __init__(self, url: str, *, request_seconds: float) -> None:
        """``url`` is empty until the server is launched."""
        self.url = url
        self.server: ServerProcess | None = None
        """The process of a server that we launched."""
        self._request_seconds = request_seconds
        self._http: aiohttp.ClientSession | None = None
        self._orders: aiohttp.ClientSession | None = None
        self._kept_from = 0.0  # monotonic; before this time kept-alive connections may be closing

    def open(self, *, is_ours: bool) -> None:
        """``is_ours``: we launched the server. A proxy before another server may have any keep-alive timeout."""
        timeout = aiohttp.ClientTimeout(total=self._request_seconds, sock_connect=_CONNECT_SECONDS)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout, read_bufsize=_READ_BYTES
        )
        kept = {"keepalive_timeout": _KEPT_SECONDS} if is_ours else {"force_close": True}
        self._orders = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, **kept), timeout=timeout)

    async def close(self) -> None:
        for session in filter(None, (self._http, self._orders)):
            await session.close()

    def check_open(self) -> None:
        """Raise EngineDied before ``open``, after ``close``, or if our server exited: its port may be another's."""
        self._session()
        if self.server is not None and not self.server.is_alive:
            raise EngineDied(f"SGLang at {self.url} exited; {self.server.log_tail()}")

    async def get(self, path: str) -> Any:
        async with self._ask("GET", path, None) as response:
            return await _content(response)

    async def knows(self, path: str) -> bool:
        """Return whether the server has this POST endpoint. A GET then fails with "not allowed", not "not found"."""
        async with self._ask("GET", path, None, is_checked=False) as response:
            return response.status != 404

    def post(self, path: str, body: Mapping[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._ask("POST", path, body)

    async def order(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST a control request and return the response."""
        async with self._ask("POST", path, body, is_order=True) as response:
            return await _content(response)

    async def flush(self) -> None:
        """Empty the server's cache. Raises EngineError while the server is busy."""
        async with self._ask("POST", "/flush_cache", {}, is_order=True):
            pass

    async def abort(self, request_id: str) -> None:
        """End a generation. Gives up after a few seconds; errors and timeouts are ignored."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS), self.post("/abort_request", {"rid": request_id}):
                pass

    def _session(self, *, of_orders: bool = False) -> aiohttp.ClientSession:
        session = self._orders if of_orders and time.monotonic() > self._kept_from else self._http
        if session is None or session.closed:
            raise EngineDied("the SGLang engine is not running: not started, or closed")
        return session

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        is_order: bool = False,
        is_checked: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """``is_checked``: raise EngineError for an error status."""
        self.check_open()
        try:
            async with self._session(of_orders=is_order).request(method, self.url + path, json=body) as response:
                if is_order and response.status >= 500:  # SGLang closes the connection after an unexpected error
                    self._kept_from = time.monotonic() + _KEPT_SECONDS
                if is_checked and response.status >= 400:
                    raise EngineError(f"{self.url}{path}: {response.status} {(await response.text())[:500]}")
                yield response
        except aiohttp.ConnectionTimeoutError as error:  # also a TimeoutError
            raise EngineDied(f"SGLang at {self.url} is unreachable: no connection in {_CONNECT_SECONDS:g} s") from error
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path}: no response within {self._request_seconds:g} s") from error
        except (aiohttp.ContentTypeError, json.JSONDecodeError) as error:  # such as a proxy's error page
            raise EngineError(f"{self.url}{path}: the response is not JSON: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            log_tail = self.server.log_tail() if self.server else ""
            raise EngineDied(f"lost SGLang at {self.url}{path}: {error!r} {log_tail}") from error


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a streamed reply. A line may be long: the last one may hold the experts of a whole answer,
    about 2 kB a token."""
    pieces: list[bytes] = []
    async for piece in content.iter_any():
        *ended, rest = piece.split(b"\n")
        for line in ended:
            yield b"".join((*pieces, line))
            pieces = []
        pieces.append(rest)
    yield b"".join(pieces)


async def _content(response: aiohttp.ClientResponse) -> Any:
    text = await response.text()
    return json.loads(text) if text else {}
