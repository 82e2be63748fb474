"""HTTP requests to one SGLang server.

Each generation opens a new connection, because a kept-alive connection that the server is closing looks like a dead
server. The control requests of a load reuse connections to a server that we launched: a busy server is slow to
accept new connections, and everything waits for a load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import aiohttp

from asyncrl.engines.sglang.server import ServerProcess
from asyncrl.errors import EngineDied, EngineError, HopelessError

_READ_BYTES = 2**20
_ABORT_SECONDS = 5.0
_METRICS_SECONDS = 5.0
_CONNECT_SECONDS = 60.0
IMAGES_AT_ONCE: Final = 8
"""Requests with images that a server reads at once. SGLang 0.5.16 makes their patches in its HTTP event loop, 14 ms for
448 x 448 pixels and 60 for 1024 x 768 on a CPU core (process_mm_data_async of multimodal/processors/qwen_vl.py); a load
would wait there behind all answers of a batch, and the paused engine with it."""
_READ_SECONDS: Final = 1.0
"""How long a load waits for those. They may also wait in the server, for free memory."""
_KEPT_SECONDS = 2.0
"""Keep-alive of connections for control requests. Shorter than the five seconds after which the server closes idle
ones."""


class ServerClient:
    """Sends requests. They raise EngineError on an error status or a timeout, EngineDied when the server is gone."""

    def __init__(self, url: str, *, request_seconds: float) -> None:
        """``url`` is empty until the server is launched."""
        self.url = url
        self.server: ServerProcess | None = None
        """The process of a server that we launched."""
        self._request_seconds = request_seconds
        self._http: aiohttp.ClientSession | None = None
        self._control_session: aiohttp.ClientSession | None = None
        self._kept_from = 0.0  # monotonic; before this time kept-alive connections may be closing

    def open(self, *, is_ours: bool) -> None:
        """``is_ours``: we launched the server. A proxy before another server may have any keep-alive timeout."""
        timeout = aiohttp.ClientTimeout(total=self._request_seconds, sock_connect=_CONNECT_SECONDS)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout, read_bufsize=_READ_BYTES
        )
        kept = {"keepalive_timeout": _KEPT_SECONDS} if is_ours else {"force_close": True}
        self._control_session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, **kept), timeout=timeout)

    async def close(self) -> None:
        for session in filter(None, (self._http, self._control_session)):
            await session.close()

    def check_open(self) -> None:
        """Raise EngineDied before ``open``, after ``close``, or if our server exited: its port may be another's."""
        self._session()
        if self.server is not None and not self.server.is_alive:
            raise EngineDied(f"SGLang has ended: {self.server.problem()}")

    async def get(self, path: str) -> Any:
        async with self._ask("GET", path, None) as response:
            return await _content(response)

    async def server_metrics(self) -> str:
        """Return the server's metrics in Prometheus' text format; "" without --enable-metrics, or while it is away."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_METRICS_SECONDS), self._ask("GET", "/metrics", None) as response:
                return await response.text()
        return ""

    async def has_endpoint(self, path: str) -> bool:
        """Return whether the server has this POST endpoint. A GET then fails with "not allowed", not "not found"."""
        async with self._ask("GET", path, None, is_checked=False) as response:
            return response.status != 404

    def post(self, path: str, body: Mapping[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._ask("POST", path, body)

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST a control request and return the response."""
        async with self._ask("POST", path, body, is_control=True) as response:
            return await _content(response)

    async def abort(self, request_id: str) -> None:
        """End a generation. Gives up after a few seconds; errors and timeouts are ignored."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS), self.post("/abort_request", {"rid": request_id}):
                pass

    def _session(self, *, of_control: bool = False) -> aiohttp.ClientSession:
        session = self._control_session if of_control and time.monotonic() > self._kept_from else self._http
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
        is_control: bool = False,
        is_checked: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """``is_checked``: raise EngineError for an error status."""
        self.check_open()
        try:
            async with self._session(of_control=is_control).request(method, self.url + path, json=body) as response:
                if is_control and response.status >= 500:  # SGLang closes the connection after an unexpected error
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
            why = self.server.problem() if self.server else "is it running?"
            raise EngineDied(f"lost SGLang at {self.url}{path}: {error!r}; {why}") from error


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


log = logging.getLogger(__name__)


async def wait_until_healthy(client: ServerClient, *, seconds: float, note: str = "") -> None:
    """Poll twice a second (SGLang sends no notification). Raises EngineDied, immediately if a launched server dies, and
    HopelessError if it dies by the same reason as in its start before.

    note  why it may take long, for messages
    """
    server = client.server
    began = reported = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            while not await _is_healthy(client):
                if time.monotonic() - reported > 15:
                    reported = time.monotonic()
                    log.info("waiting for SGLang at %s for %.0f s%s", client.url, reported - began, note)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await (server.wait() if server else asyncio.Event().wait())
    except TimeoutError as error:
        why = f"the end of its log: {server.problem()}" if server else "is it running?"
        raise EngineDied(
            f"SGLang did not start within engine.options.start_seconds = {seconds:g}{note} at {client.url}; {why}"
        ) from error
    except EngineDied as error:
        if server is not None and not server.is_alive and server.repeats():
            raise HopelessError(f"{error}; its last start ended the same way, so it is not tried again") from error
        raise
    log.info("SGLang at %s is up after %.0f s", client.url, time.monotonic() - began)


async def ask_first(client: ServerClient, request: Mapping[str, Any], *, seconds: float) -> Any:
    """Return the answer to a first request, which also warms up the server. Raises EngineDied without an answer."""
    try:
        async with asyncio.timeout(seconds), client.post("/generate", request) as response:
            return await response.json()
    except TimeoutError:
        raise EngineDied(
            f"SGLang at {client.url} generates no tokens: is it paused? A process that died while loading weights "
            "leaves it paused, perhaps with partly loaded weights; restart it"
        ) from None


async def _is_healthy(client: ServerClient) -> bool:
    try:
        await client.get("/health")
    except EngineError:
        client.check_open()
        return False
    client.check_open()  # another server may have its port
    return True


class Places:
    """Limits concurrent requests to a server, and blocks new ones while weights load (``is_open`` is cleared).

    read_seconds  how long a load waits for requests with images that the server has not read; None: until it has
    """

    def __init__(self, *, read_seconds: float | None = _READ_SECONDS) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.max_running = 2**31
        """Requests that the server decodes at once; others wait in it."""
        self._held = self._sent = self._unread = 0
        self._image_places = asyncio.Semaphore(IMAGES_AT_ONCE)
        self._are_read = asyncio.Event()
        self._are_read.set()
        self._read_seconds = read_seconds

    @asynccontextmanager
    async def place(self, *, has_images: bool = False) -> AsyncIterator[Callable[[], None]]:
        """Wait until a request may be sent, then count it as sent. Yields what to call with its first token."""
        with contextlib.ExitStack() as reading:
            self._held += 1
            try:
                if has_images:
                    await self._image_places.acquire()
                    reading.callback(self._image_places.release)
                await self.is_open.wait()
            finally:
                self._held -= 1
            if has_images:
                self._note_unread(1)
                reading.callback(self._note_unread, -1)
            self._sent += 1
            try:
                yield reading.close
            finally:
                self._sent -= 1

    def _note_unread(self, change: int) -> None:
        self._unread += change
        if self._unread:
            self._are_read.clear()
        else:
            self._are_read.set()

    async def close(self) -> None:
        """Block new requests, and wait until the server has read the images of those that it has."""
        self.is_open.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._read_seconds):
                await self._are_read.wait()

    @property
    def running(self) -> int:
        return min(self._sent, self.max_running)

    @property
    def queued(self) -> int:
        return self._held + self._sent - self.running
