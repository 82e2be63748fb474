"""harness = "outside": an outside producer plays the sample via `asyncrl serve` (asyncrl/environments/agent/entry.py).

The worker opens a WebSocket to the entry, offers the sample there, and waits. A producer that takes the offer gets the
task and the worker's endpoint, and ends the session with a reward. The time limit counts from when a producer takes the
sample. If the entry is down or restarts, the worker keeps reconnecting, and sessions that have started continue.
Tests: tests/unit/environments/agent/test_entry.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of
from asyncrl.errors import ConfigError, RolloutError

RETRY_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = 20.0
"""A connection that is silent for this long is considered broken."""
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = "http://127.0.0.1:8430"
    """Address of `asyncrl serve`."""
    key_file: str = "serve.key"
    """File with the key of workers and producers; `asyncrl serve` creates it if it is missing."""

    def __post_init__(self) -> None:
        try:
            found = urlsplit(self.url)
            is_url = found.scheme == "http" and bool(found.hostname) and found.port is not None
        except ValueError:  # an invalid port
            is_url = False
        if not is_url:
            raise ConfigError(f"url must be http://HOST:PORT, got {self.url!r}")
        if not self.key_file:
            raise ConfigError("key_file is empty; name a file for the key")

    def key(self) -> str:
        """Read the key. Raises OSError and ValueError while it cannot be read."""
        return Path(self.key_file).read_text().strip()


class OutsideHarness:
    """A Harness whose samples begin when a producer takes them (load.py)."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def begun(self, task: Task, endpoint: Endpoint) -> AsyncIterator[Callable[[], Awaitable[Outcome]]]:
        """Wait for a producer to take the sample, then yield a function that waits for the outcome.

        If the context is left without an outcome, the session is over and the producer is told why.
        """
        if self._http is None:  # one connection per sample; aiohttp's default limit is 100
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        talk = _Talk(self._http, self._options, task, endpoint)
        reason = "it took longer than rollout.options.timeout_seconds"
        try:
            await talk.until("started")
            yield talk.outcome
        except asyncio.CancelledError:
            reason = "its worker gave it back; the sample is made again"
            raise
        finally:
            await talk.end(reason)

    async def __call__(self, task: Task, endpoint: Endpoint) -> Outcome:
        async with self.begun(task, endpoint) as play:
            return await play()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class _Talk:
    """The conversation with the entry about one sample, over successive connections."""

    def __init__(self, http: aiohttp.ClientSession, options: Options, task: Task, endpoint: Endpoint) -> None:
        self._http = http
        self._options = options
        self._offer = {"id": secrets.token_hex(8), "task": task.as_json(), "endpoint": endpoint.as_json()}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_started = self._is_over = False

    async def outcome(self) -> Outcome:
        """Wait for the outcome. Raises RolloutError if the session was abandoned."""
        said = await self.until("outcome", "abandoned")
        self._is_over = True
        assert self._socket is not None
        with contextlib.suppress(OSError):
            await self._socket.send_json({"taken": True})
        if "abandoned" in said:
            raise RolloutError(f"harness outside: the session was abandoned: {said['abandoned']}")
        return outcome_of(said["outcome"])

    async def until(self, *names: str) -> dict[str, Any]:
        """Wait for the first message that has one of these names, and return it."""
        while True:
            socket = self._socket = self._socket or await self._connect()
            message = await socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                await self._disconnect()
                continue
            said: dict[str, Any] = json.loads(message.data)
            self._is_started |= "started" in said
            if any(name in said for name in names):
                return said

    async def end(self, reason: str) -> None:
        if self._socket is not None and not self._is_over:
            with contextlib.suppress(OSError):
                await self._socket.send_json({"over": reason})
        await self._disconnect()

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        """Retry until an entry accepts the offer, and return the socket. Raises RolloutError if it refuses the key."""
        said = ""
        while True:
            try:
                socket = await self._http.ws_connect(
                    f"{self._options.url}/offers",
                    headers={"Authorization": f"Bearer {self._options.key()}"},
                    heartbeat=HEARTBEAT_SECONDS,
                    max_msg_size=0,
                )
                await socket.send_str(json.dumps({**self._offer, "is_started": self._is_started}, default=str))
                return socket
            except aiohttp.WSServerHandshakeError as error:
                if error.status == 401:
                    file = self._options.key_file
                    raise RolloutError(f"harness outside: {self._options.url} refuses the key of {file}") from error
                problem = f"it answers {error.status}"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = str(error)
            if problem != said:
                log.warning("harness outside: no entry at %s, is `asyncrl serve` up? %s", self._options.url, problem)
                said = problem
            await asyncio.sleep(RETRY_SECONDS)
