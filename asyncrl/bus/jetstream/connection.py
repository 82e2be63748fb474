"""One connection to a nats-server or cluster: subscriptions, and requests that survive server restarts.

The only file that imports nats.

1. A cancellation is never lost: every nats call goes through ``guarded`` (cancellation.py).
2. While the server is down every call waits. When it is back, unanswered requests are sent again
   (test_a_restarted_server_is_transparent). Message ids make repetition harmless. The same holds while a cluster elects
   a new leader for a stream, which takes four to ten seconds (tests/integration/cluster/test_nats_cluster.py).
   A slow link is not mistaken for a dead server: repeated requests get time to arrive, and a connection that still
   transfers data is kept (test_a_slow_way_is_given_the_time_that_a_message_takes).
3. No call waits forever for a server that is up but does not answer: BusError after a minute.
4. With ``awaits_streams``, a call about a deleted stream waits until the learner has created the stream again
   (test_whoever_needs_a_stream_that_is_gone_waits_for_it).
5. Acks are requests that the server confirms, so an ack has taken effect when its call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import nats.errors
from nats.aio.client import Client

from asyncrl.bus.jetstream.cancellation import guarded
from asyncrl.bus.jetstream.connecting import connect_error, drained, end_attempt, expect_signs_of_life, require_version
from asyncrl.bus.jetstream.credentials import Credentials, answers, inbox
from asyncrl.bus.jetstream.errors import (
    BUSY,
    IN_PROCESS,
    NO_STREAM,
    STREAM_GONE,
    Busy,
    Nobody,
    PublishAck,
    Refused,
    Reply,
    stream_of,
)
from asyncrl.bus.jetstream.pending_requests import PendingRequests
from asyncrl.config.addresses import servers, without_secrets
from asyncrl.errors import BusError, ConfigError, Forbidden, NoAnswer, Unanswered

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 5.0
"""Time until a request is repeated: the server may be dead, and another server may lead its streams by now."""
_SLOW_BYTES_PER_SECOND: Final = 32 * 2**10
"""Slowest tolerated link. The time to send all unanswered bytes at this rate is added to _ANSWER_SECONDS."""
_PING_SECONDS: Final = 5
_FROZEN_SECONDS: Final = 60
"""Limit for a silent server whose kernel still acknowledges. It is long because pings queue behind messages."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 60.0
_NOBODY_SECONDS: Final = 30.0
"""How long a request without a responder is repeated. A server that just started may still be opening its streams, and
a cluster may be electing their leaders."""
_LEAVE_SECONDS: Final = 5.0
_FORBIDDEN: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_PASSING: Final = (
    TimeoutError,
    OSError,
    nats.errors.ConnectionClosedError,  # permanently, which the next check of the connection reports
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
)


async def dial(url: str, *, access: Credentials, run: str, seconds: float) -> Connection:
    """Connect with our credentials. Raises ConfigError, as ``Connection.open`` does."""
    connection = Connection(url)
    try:
        await connection.open(
            url,
            options=access.options(),
            inbox=inbox(access.role, run=run),
            answers=answers(access.role, run=run),
            seconds=seconds,
        )
    except BaseException:
        await connection.close()
        raise
    connection.awaits_streams = access.takes_part
    return connection


class Connection:
    """A nats client that waits for the server and repeats requests. Implements ``ordered_consumer.Wire``."""

    def __init__(self, url: str) -> None:
        self._client: Any = Client()
        self.name = without_secrets(url)
        self.generation = 0
        self.awaits_streams = False
        """Whether to wait for a missing stream. True for roles that take part in a run."""
        self._online = asyncio.Event()
        self._over = asyncio.Event()
        self._is_starting = True
        self._is_closing = False
        self._nobody_seconds = 0.0
        self._said = ""
        self._pending = PendingRequests(inbox="", answers="")
        self._hears_clients = False
        self._num_busy = 0  # requests waiting while JetStream is temporarily unavailable
        self._listeners: set[Callable[[], None]] = set()
        self._leaving: set[asyncio.Future[None]] = set()

    async def open(
        self, url: str, *, options: Mapping[str, Any], inbox: str, answers: str = "", seconds: float
    ) -> None:
        """Connect. ``options``, ``inbox``, ``answers``: from credentials.py. Raises ConfigError if the server is
        unreachable or too old, the token is wrong or JetStream is off; BusError if a cluster has no quorum."""
        addresses = servers(url)
        try:
            async with asyncio.timeout(seconds):
                await guarded(
                    self._client.connect(
                        addresses,
                        **options,
                        name="asyncrl",
                        error_cb=self._on_error,
                        disconnected_cb=self._on_disconnect,
                        reconnected_cb=self._on_reconnect,
                        closed_cb=self._on_close,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=0.25,
                        connect_timeout=seconds / (len(addresses) + 1),  # leaves time for the others if one fails
                        ping_interval=_PING_SECONDS,
                        max_outstanding_pings=_FROZEN_SECONDS // _PING_SECONDS,
                    )
                )
        except TimeoutError:
            raise NoAnswer(
                f"bus.url {self.name}: no response ({self._said or 'no route'}); "
                f"start `nats-server -js` there or leave bus.url empty"
            ) from None
        except ConfigError:
            raise
        except (nats.errors.Error, ValueError, ssl.SSLError) as error:
            raise connect_error(self.name, error) from None
        finally:
            self._is_starting = False
        expect_signs_of_life(self._client)
        self._online.set()
        self._pending = PendingRequests(inbox=inbox, answers=answers)
        await self.subscribe(f"{self._pending.inbox}.*", self._pending.on_answer)
        require_version(self.name, self._client.connected_server_version)
        try:
            await self.api("INFO")
        except Forbidden as error:
            raise ConfigError(str(error)) from None
        except (Nobody, Refused) as error:
            raise ConfigError(
                f"bus.url {self.name}: JetStream is off there ({error}); start the server as `nats-server -js`; "
                "after bin/nats-config, reload it twice"
            ) from None
        self._nobody_seconds = _NOBODY_SECONDS

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    async def close(self) -> None:
        if not self._client.servers:
            return  # invalid url: nothing was opened
        self._is_closing = True
        # TypeError: asyncio of Python 3.12 writes to a transport while the server closes its end
        with contextlib.suppress(nats.errors.Error, OSError, TypeError):
            await guarded(self._client.close())
        # A drain in progress waits for messages that no task takes any more. No read loop is left to harm.
        if leaving := tuple(self._leaving):
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving, timeout=_LEAVE_SECONDS)

    # -- asking ---------------------------------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        only_in: int | None = None,
        patience: float = _PATIENCE_SECONDS,
    ) -> Reply:
        """Return the reply. Repeat the request until a restarted server is back. Raises BusError.

        only_in   connection generation of the request; raises Unanswered after a reconnect, as no reply can come then
        patience  seconds that a running server may take before Unanswered is raised
        """
        pause, asked = _FIRST_PAUSE_SECONDS, 0
        generation, since = self.generation, time.monotonic()
        stream, was_there = stream_of(subject, headers or {}) if self.awaits_streams else "", False
        while True:
            await self.online()
            if only_in not in (None, self.generation):
                raise Unanswered(f"bus {self.name}: reconnected since {subject} was created")
            if generation != self.generation:
                generation, since = self.generation, time.monotonic()
            message = await self._ask(subject, data, headers)
            asked += 1
            is_nobody = message is not None and (message.headers or {}).get("Status") == "503"
            if message is not None and not is_nobody:
                return Reply(message.data, message.headers or {}, asked > 1)
            waited = time.monotonic() - since
            if not self._over.is_set() and waited >= min(patience, self._nobody_seconds if is_nobody else patience):
                if is_nobody and stream:
                    is_there = not await self._is_gone(stream)
                    if not (is_there and was_there):  # missing, or created again since the last check
                        was_there, since = is_there, time.monotonic()
                        continue
                if is_nobody:
                    raise Nobody(f"bus {self.name}: no responder for {subject}; was the server's store deleted?")
                raise Unanswered(
                    f"bus {self.name}: no answer at {subject} for {waited:.0f} s; "
                    f"is the server's disk full? See its log"  # with a full disk the server does not answer
                )
            await self._rest(pause)  # back off, so as not to load a busy server further
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    async def ask(self, subject: str, data: bytes, *, seconds: float) -> bytes | None:
        """Send one request to another client. Return its reply; None if no client listens or the reply is late."""
        try:
            async with asyncio.timeout(seconds):
                await self.online()
                if not self._hears_clients:
                    await self.subscribe(f"{self._pending.answers}.*", self._pending.on_answer)
                    self._hears_clients = True
                message = await self._ask(subject, data, None, seconds=seconds, inbox=self._pending.answers)
        except TimeoutError:
            return None
        if message is None or (message.headers or {}).get("Status") == "503":
            return None
        return bytes(message.data)

    async def _is_gone(self, stream: str) -> bool:
        """Whether the stream does not exist."""
        try:
            await self.api(f"STREAM.INFO.{stream}", awaits_stream=False)
        except Refused as refused:
            return refused.code == NO_STREAM
        return False

    async def api(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        *,
        patience: float = _PATIENCE_SECONDS,
        awaits_stream: bool = True,
    ) -> dict[str, Any]:
        """Send one request of the JetStream API. Raises Refused, and Unanswered as ``request`` does.

        awaits_stream  False: a missing stream is an error
        """
        data = json.dumps(body).encode() if body else b""
        answer = await self.store(f"$JS.API.{verb}", data, patience=patience, awaits_stream=awaits_stream)
        if "error" in answer.found:
            raise Refused(verb, answer.found["error"])
        return answer.found

    async def store(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        patience: float = _PATIENCE_SECONDS,
        awaits_stream: bool = True,
    ) -> PublishAck:
        """Return JetStream's reply, which may be an error. Temporary errors are retried for a minute; a missing stream
        is waited for.

        Raises Busy after that minute, and Unanswered as ``request`` does.
        """
        pause, since, in_doubt, is_slow = _FIRST_PAUSE_SECONDS, time.monotonic(), False, False
        try:
            while True:
                answer = await self.request(subject, data, headers=headers, patience=patience)
                in_doubt |= answer.in_doubt
                found: dict[str, Any] = json.loads(answer.data)
                code = found.get("error", {}).get("err_code")
                is_gone = code in STREAM_GONE and awaits_stream and self.awaits_streams
                if code not in BUSY and not is_gone:
                    return PublishAck(found, in_doubt)
                if not is_gone and time.monotonic() - since >= _PATIENCE_SECONDS:
                    raise Busy(f"bus {self.name}: {subject}", found["error"])
                in_doubt |= code != IN_PROCESS and not is_gone
                if pause == _LAST_PAUSE_SECONDS and not is_slow:
                    is_slow = True
                    self._num_busy += 1
                    if self._num_busy == 1:  # one line for all waiting requests
                        description = found["error"].get("description")
                        until = "waiting for the learner to make it again" if is_gone else "retrying for a minute"
                        logger.warning("bus %s: %s: %s; %s", self.name, subject, description, until)
                await self._rest(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        finally:
            self._num_busy -= is_slow

    async def _rest(self, seconds: float) -> None:
        """waits for: the clock     woken by: the end of the connection"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        """Send a message that may be lost. The sender must notice a missing reply."""
        with contextlib.suppress(nats.errors.Error, OSError):
            await guarded(self._client.publish(subject, data, reply=reply))

    async def _ask(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, *, seconds: float = 0.0, inbox: str = ""
    ) -> Any:
        """Return the reply; None if it is late or the connection is lost. ``seconds``: 0 takes the default timeout."""
        pending = self._pending
        try:
            with pending.added(subject, num_bytes=len(data), inbox=inbox or pending.inbox) as (reply, answer):
                await guarded(self._client.publish(subject, data, reply=reply, headers=headers))
                async with asyncio.timeout(seconds or _ANSWER_SECONDS + pending.num_bytes / _SLOW_BYTES_PER_SECOND):
                    return await answer
        except _PASSING:
            return None
        except nats.errors.Error as error:  # e.g. too large for a reconfigured server; repeating does not help
            raise BusError(f"bus {self.name}: {subject}: {error}") from error

    # -- listening ------------------------------------------------------------------------------------------------

    def inbox(self) -> str:
        return self._pending.new_inbox()

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]], *, queue: str = "") -> Any:
        """``queue``: name of a queue group. Each message goes to one subscriber of the group."""
        await self.online()
        return await guarded(self._client.subscribe(subject, queue=queue, cb=on_message))

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        """Unsubscribe. With ``drain``, messages in flight still arrive. Cancelling the caller does not cancel this."""
        is_here = drain and self._online.is_set() and not self._over.is_set()
        leaving = asyncio.ensure_future(drained(self._client, subscription) if is_here else subscription.unsubscribe())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._left)
        await asyncio.wait((leaving,), timeout=_LEAVE_SECONDS)

    def _left(self, leaving: asyncio.Future[None]) -> None:
        self._leaving.discard(leaving)
        error = None if leaving.cancelled() else leaving.exception()
        if error is not None and not isinstance(error, (nats.errors.Error, OSError, TimeoutError)):
            logger.error("bus %s: unsubscribing failed: %r", self.name, error)

    async def online(self) -> None:
        await self._online.wait()
        if self._over.is_set():
            raise BusError(f"bus {self.name}: the connection is closed ({self._client.last_error or 'by us'})")

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)

    async def _on_error(self, error: Exception) -> None:
        """Handle an error of nats-py. Cancelled connection attempts also end here: asyncio.wait_for can lose their
        cancellation, and they would go on forever after ``close`` or after the time limit of ``open``."""
        end_attempt(self._client)
        task = asyncio.current_task()
        if (self._is_closing or self._is_starting) and task is not None and task.cancelling():
            raise asyncio.CancelledError
        text = str(error) or type(error).__name__
        if self._is_starting and "authorization" in text.lower():
            raise ConfigError(
                f"bus.url {self.name}: the server refuses the token or password; set bus.token, ASYNCRL_BUS_TOKEN or "
                "bus.credentials to its own"
            )
        is_known = isinstance(error, (OSError, nats.errors.StaleConnectionError))  # logged as "connection lost"
        if (forbidden := _FORBIDDEN.search(text.lower())) is not None:
            problem = f"bus {self.name}: {text}; the role or run of bus.credentials or bus.token may not do this"
            is_known = self._pending.forbid(*forbidden.groups(), problem=problem)
        if text != self._said and not self._is_starting:
            logger.log(logging.DEBUG if is_known else logging.WARNING, "bus %s: %s", self.name, text)
        self._said = text

    async def _on_disconnect(self) -> None:
        self._online.clear()
        self._pending.give_up()
        if not self._is_starting and not self._is_closing:
            logger.warning("bus %s: connection lost; all requests wait until it is back", self.name)

    async def _on_reconnect(self) -> None:
        expect_signs_of_life(self._client)
        self.generation += 1
        self._said = ""
        self._online.set()
        logger.warning("bus %s: reconnected", self.name)
        self._tell()

    async def _on_close(self) -> None:
        self._over.set()
        self._online.set()  # wake all waiters, so they notice the end
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
