"""harness = "outside": whoever asks for it plays the sample, through `asyncrl serve` (asyncrl/rollouts/agent/entry.py).

The worker offers each sample there, over a WebSocket that it opens, and waits. A producer that takes the offer gets the
task and the worker's endpoint; it ends the session with a reward. Its time runs from then, not from the offer. An entry
that is away, or was started again, is asked until it is there: sessions that were begun go on.
Tests: tests/unit/rollouts/agent/test_entry.py.
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

from asyncrl.errors import ConfigError, RolloutError
from asyncrl.rollouts.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of

RETRY_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = 20.0
"""After which a connection that says nothing is broken."""
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = "http://127.0.0.1:8430"
    """Of `asyncrl serve`, which listens there."""
    key_file: str = "serve.key"
    """The key that workers and producers show; `asyncrl serve` makes the file when it is not there."""

    def __post_init__(self) -> None:
        try:
            found = urlsplit(self.url)
            is_url = found.scheme == "http" and bool(found.hostname) and found.port is not None
        except ValueError:  # of a port that is none
            is_url = False
        if not is_url:
            raise ConfigError(f"url must be http://HOST:PORT, got {self.url!r}")
        if not self.key_file:
            raise ConfigError("key_file is empty; name a file for the key")

    def key(self) -> str:
        """Raises OSError and ValueError while there is none."""
        return Path(self.key_file).read_text().strip()


class OutsideHarness:
    """A Harness whose samples begin when somebody takes them (limits.py)."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def begun(
        self, task: Task, endpoint: Endpoint, check: Callable[[Outcome], None] = lambda outcome: None
    ) -> AsyncIterator[Callable[[], Awaitable[Outcome]]]:
        """Entered once a producer has taken the sample; what it yields waits for an end of its session that ``check``
        lets pass; of any other the producer is told why, and the session goes on.

        Left without that end, the session is over, and its producer is told why.
        """
        if self._http is None:  # a connection a sample, and aiohttp has at most 100 unless it is told otherwise
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        talk = _Talk(self._http, self._options, task, endpoint, check)
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
    """What is said of one sample, over one connection after another."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        options: Options,
        task: Task,
        endpoint: Endpoint,
        check: Callable[[Outcome], None],
    ) -> None:
        self._http, self._options, self._check = http, options, check
        self._offer = {"id": secrets.token_hex(8), "task": task.as_json(), "endpoint": endpoint.as_json()}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_started = self._is_over = False

    async def outcome(self) -> Outcome:
        """Raises RolloutError if it was abandoned."""
        while True:
            said = await self.until("outcome", "abandoned")
            outcome = outcome_of(said.get("outcome"))
            try:
                if "outcome" in said:
                    self._check(outcome)
            except RolloutError as error:
                await self._answer({"refused": said["number"], "reason": str(error)})
                continue
            self._is_over = True
            await self._answer({"taken": True})
            if "abandoned" in said:
                raise RolloutError(f"harness outside: the session was abandoned: {said['abandoned']}")
            return outcome

    async def _answer(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            await self._socket.send_json(message)

    async def until(self, *names: str) -> dict[str, Any]:
        """The first message that has one of these names."""
        while True:
            socket = self._socket = self._socket or await self._connected()
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

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        """Until there is an entry that takes the offer. Raises RolloutError if it refuses the key."""
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
