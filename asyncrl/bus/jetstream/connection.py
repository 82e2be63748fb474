"""One connection to a nats-server or cluster: subscriptions, and requests that survive server restarts.

The only file that imports nats.

1. A cancellation is never lost: every nats call goes through ``guarded``.
2. While the server is down every call waits. When it is back, unanswered requests are sent again
   (test_a_restarted_server_is_transparent). Message ids make repetition harmless. The same holds while a cluster elects
   a new leader for a stream, which takes four to ten seconds (tests/integration/cluster/test_nats_cluster.py).
   A slow link is not mistaken for a dead server: repeated requests get time to arrive, and a connection that still
   transfers data is kept (test_slow_link_is_given_time_for_a_large_message).
3. No call waits forever for a server that is up but does not answer: BusError after a minute.
4. With ``awaits_streams``, a call about a deleted stream waits until the learner has created the stream again
   (test_a_worker_waits_for_the_learner_that_makes_deleted_streams_again).
5. Acks are requests that the server confirms, so an ack has taken effect when its call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client

from asyncrl.bus.jetstream.credentials import Credentials, answers, inbox
from asyncrl.config.addresses import servers, without_secrets
from asyncrl.errors import BusClosed, BusError, ConfigError, Forbidden, NoAnswer, Unanswered

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
_NO_RESPONDER_SECONDS: Final = 30.0
"""How long a request without a responder is repeated. A server that just started may still be opening its streams, and
a cluster may be electing their leaders."""
_LEAVE_SECONDS: Final = 5.0
_DRAIN_SECONDS: Final = 10
"""How long a drain waits for the server."""
_LATE_SECONDS: Final = 1.0
"""How long a drained subscription still hears messages: a server sends some, a few ms after it said that it sends no
more (its consumer had chosen the inbox before), and counts them as delivered."""
_OLDEST: Final = (2, 10)
_DEAD_SECONDS: Final = 15
"""TCP_USER_TIMEOUT: the kernel drops a connection if data or pings stay unacknowledged for this long."""
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

IN_PROCESS: Final = 10158
"""A message with this id is being stored right now."""
LEADERLESS: Final = {10004, 10008, 10009, IN_PROCESS}
"""Errors of a cluster without a leader (during an election, or with too few servers). In order: incomplete results;
temporarily unavailable; no longer the leader; a message stuck while being stored."""
IS_GONE: Final = "not found", "no message found", "stream store EOF"
"""Descriptions of error 10043, and of 10057, which also has other meanings. The last: beyond the end of the stream."""
BUSY: Final = {*LEADERLESS, 10012, 10149, 10167}
"""Temporary JetStream errors. Besides LEADERLESS: a consumer's store, or the consumer, cannot be created while one of
the same name is being removed; too many requests."""

NO_STREAM: Final = 10059
STREAM_GONE: Final = {NO_STREAM, 10060}
"""The stream does not exist, or another one has its subjects."""

_ABOUT_STREAM: Final = re.compile(
    r"\$JS\.API\.(?:STREAM\.(?:MSG\.)?[A-Z]+|DIRECT\.GET|CONSUMER\.(?:MSG\.)?[A-Z]+)\.([^.]+)"
)

T = TypeVar("T")


class Refused(BusError):
    """An error reply from JetStream."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: the bus refuses: {self.description} (JetStream error {self.code})")


def stream_of(subject: str, headers: Mapping[str, str]) -> str:
    """Return the stream that a request concerns; "" if it concerns none."""
    if "Nats-Expected-Stream" in headers:
        return headers["Nats-Expected-Stream"]
    if (found := _ABOUT_STREAM.match(subject)) is None:
        return ""
    return found[1]


class Busy(BusError):
    """JetStream was temporarily unavailable for a minute. Retrying later may succeed."""

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        code = int(error.get("err_code", 0))
        remedy = "no quorum: start the other servers of the cluster" if code in LEADERLESS else "the server is busy"
        super().__init__(f"{what}: {remedy} ({error.get('description', '')}, JetStream error {code})")


class NoResponder(Unanswered):
    """No responder listens at this subject."""


@dataclass(frozen=True, slots=True)
class Reply:
    """``in_doubt``: the request was sent more than once, so an earlier attempt may have taken effect."""

    data: bytes
    headers: Mapping[str, str]
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class PublishAck:
    """JetStream's reply to a stored message; ``in_doubt`` as in Reply."""

    found: dict[str, Any]
    in_doubt: bool


async def dial(url: str, *, access: Credentials, run: str, seconds: float) -> Connection:
    """Connect with our credentials. Raises ConfigError, as ``Connection.open`` does."""
    connection = Connection(url)
    try:
        await connection.open(
            url,
            options=access.options(),
            inbox=inbox(access.role, run=run, worker=access.worker),
            answers=answers(access.role, run=run, worker=access.worker),
            seconds=seconds,
        )
    except BaseException:
        await connection.close()
        raise
    connection.awaits_streams = access.takes_part
    return connection


@dataclass(slots=True)
class _Request:
    subject: str
    answer: asyncio.Future[Any]


class Connection:
    """A nats client that waits for the server and repeats requests."""

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
        self._no_responder_seconds = 0.0
        self._last_error = ""
        self._prefix = self._inbox = self._answers = ""  # subjects of replies: from JetStream, from other clients
        self._requests: dict[str, _Request] = {}  # that wait for a reply, by the last token of its subject
        self._waiting_bytes = 0  # of these requests
        self._inbox_problem = ""  # why no replies can arrive
        self._hears_answers = False
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
                f"bus.url {self.name}: no response ({self._last_error or 'no route'}); "
                f"start `nats-server -js` there or leave bus.url empty"
            ) from None
        except ConfigError:
            raise
        except (nats.errors.Error, ValueError, ssl.SSLError) as error:
            raise _connect_error(self.name, error) from None
        finally:
            self._is_starting = False
        _expect_signs_of_life(self._client)
        self._online.set()
        self._prefix, self._inbox, self._answers = inbox, new_inbox(inbox), new_inbox(answers)
        await self.subscribe(f"{self._inbox}.*", self._on_answer)
        _require_version(self.name, self._client.connected_server_version)
        try:
            await self.api("INFO")
        except Forbidden as error:
            raise ConfigError(str(error)) from None
        except (NoResponder, Refused) as error:
            raise ConfigError(
                f"bus.url {self.name}: JetStream is off there ({error}); start the server as `nats-server -js`; "
                "after bin/nats-config, reload it twice"
            ) from None
        self._no_responder_seconds = _NO_RESPONDER_SECONDS

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    async def close(self) -> None:
        if not self._client.servers:
            return  # invalid url: nothing was opened
        self._is_closing = True
        await self._on_disconnect()  # at once: nats-py may wait for a server that closes its end, and then tells nobody
        await self._on_close()
        # TypeError: asyncio of Python 3.12 writes to a transport while the server closes its end
        with contextlib.suppress(nats.errors.Error, OSError, TypeError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
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
            message = await self._request_once(subject, data, headers)
            asked += 1
            has_no_responder = message is not None and (message.headers or {}).get("Status") == "503"
            if message is not None and not has_no_responder:
                return Reply(message.data, message.headers or {}, asked > 1)
            waited = time.monotonic() - since
            limit = min(patience, self._no_responder_seconds) if has_no_responder else patience
            if not self._over.is_set() and waited >= limit:
                if has_no_responder and stream:
                    is_there = not await self._is_gone(stream)
                    if not (is_there and was_there):  # missing, or created again since the last check
                        was_there, since = is_there, time.monotonic()
                        continue
                if has_no_responder:
                    raise NoResponder(f"bus {self.name}: no responder for {subject}; was the server's store deleted?")
                raise Unanswered(
                    f"bus {self.name}: no answer at {subject} for {waited:.0f} s; "
                    f"is the server's disk full? See its log"  # with a full disk the server does not answer
                )
            await self._sleep(pause)  # back off, so as not to load a busy server further
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    async def ask(self, subject: str, data: bytes, *, seconds: float) -> bytes | None:
        """Send one request to another client. Return its reply; None if no client listens or the reply is late."""
        try:
            async with asyncio.timeout(seconds):
                await self.online()
                if not self._hears_answers:
                    await self.subscribe(f"{self._answers}.*", self._on_answer)
                    self._hears_answers = True
                message = await self._request_once(subject, data, None, seconds=seconds, inbox=self._answers)
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
        awaits_stream: bool = True,
    ) -> dict[str, Any]:
        """Send one request of the JetStream API. Raises Refused, and Unanswered as ``request`` does.

        awaits_stream  False: a missing stream is an error
        """
        data = json.dumps(body).encode() if body else b""
        answer = await self.store(f"$JS.API.{verb}", data, awaits_stream=awaits_stream)
        if "error" in answer.found:
            raise Refused(verb, answer.found["error"])
        return answer.found

    async def store(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        awaits_stream: bool = True,
    ) -> PublishAck:
        """Return JetStream's reply, which may be an error. Temporary errors are retried for a minute; a missing stream
        is waited for.

        Raises Busy after that minute, and Unanswered as ``request`` does.
        """
        pause, since, in_doubt, is_slow = _FIRST_PAUSE_SECONDS, time.monotonic(), False, False
        try:
            while True:
                answer = await self.request(subject, data, headers=headers)
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
                await self._sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        finally:
            self._num_busy -= is_slow

    async def _sleep(self, seconds: float) -> None:
        """waits for: the clock     woken by: the end of the connection"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        """Send a message that may be lost. The sender must notice a missing reply."""
        with contextlib.suppress(nats.errors.Error, OSError):
            await guarded(self._client.publish(subject, data, reply=reply))

    async def _request_once(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, *, seconds: float = 0.0, inbox: str = ""
    ) -> Any:
        """Return the reply; None if it is late or the connection is lost. ``seconds``: 0 takes the default timeout."""
        if self._inbox_problem:
            raise Forbidden(self._inbox_problem)
        # Clients of one user may listen to each other's inboxes, but learn a random subject only with the reply.
        place = secrets.token_hex(8)
        request = self._requests[place] = _Request(subject, asyncio.get_running_loop().create_future())
        self._waiting_bytes += len(data)
        try:
            reply = f"{inbox or self._inbox}.{place}"
            await guarded(self._client.publish(subject, data, reply=reply, headers=headers))
            async with asyncio.timeout(seconds or _ANSWER_SECONDS + self._waiting_bytes / _SLOW_BYTES_PER_SECOND):
                return await request.answer
        except _PASSING:
            return None
        except nats.errors.Error as error:  # e.g. too large for a reconfigured server; repeating does not help
            raise BusError(f"bus {self.name}: {subject}: {error}") from error
        finally:
            del self._requests[place]
            self._waiting_bytes -= len(data)

    async def _on_answer(self, message: Any) -> None:
        request = self._requests.get(message.subject.rpartition(".")[2])
        if request is not None and not request.answer.done():
            request.answer.set_result(message)

    def _forbid(self, what: str, subject: str, *, problem: str) -> bool:
        """Fail requests to ``subject`` at once, as no reply will come. nats-py reports the subject in lower case.

        what  publish or subscription

        Return False if there were no such requests, so the error has not been reported yet.
        """
        is_inbox = what == "subscription" and subject == f"{self._inbox}.*".lower()
        if is_inbox:
            self._inbox_problem = problem
        waiting = [request for request in self._requests.values() if not request.answer.done()]
        failed = [one for one in waiting if is_inbox or (what == "publish" and one.subject.lower() == subject)]
        for request in failed:
            request.answer.set_exception(Forbidden(problem))
        return bool(failed)

    # -- listening ------------------------------------------------------------------------------------------------

    def inbox(self) -> str:
        """Return a subject for many messages, such as those of a consumer."""
        return new_inbox(self._prefix)

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]], *, queue: str = "") -> Any:
        """``queue``: name of a queue group. Each message goes to one subscriber of the group."""
        await self.online()
        return await guarded(self._client.subscribe(subject, queue=queue, cb=on_message))

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        """Unsubscribe. With ``drain``, messages in flight still arrive, late ones after this has returned. Cancelling
        the caller does not cancel this."""
        is_here = drain and self._online.is_set() and not self._over.is_set()
        answered = asyncio.Event()
        leaving = asyncio.ensure_future(
            _drain(self._client, subscription, answered) if is_here else subscription.unsubscribe()
        )
        self._leaving.add(leaving)
        leaving.add_done_callback(self._on_unsubscribed)
        leaving.add_done_callback(lambda _: answered.set())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await answered.wait()

    def _on_unsubscribed(self, leaving: asyncio.Future[None]) -> None:
        self._leaving.discard(leaving)
        error = None if leaving.cancelled() else leaving.exception()
        if error is not None and not isinstance(error, (nats.errors.Error, OSError, TimeoutError)):
            logger.error("bus %s: unsubscribing failed: %r", self.name, error)

    async def online(self) -> None:
        await self._online.wait()
        if self._over.is_set():
            raise BusClosed(f"bus {self.name}: the connection is closed ({self._client.last_error or 'by us'})")

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)

    async def _on_error(self, error: Exception) -> None:
        """Handle an error of nats-py. Cancelled connection attempts also end here: asyncio.wait_for can lose their
        cancellation, and they would go on forever after ``close`` or after the time limit of ``open``."""
        _end_attempt(self._client)
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
            is_known = self._forbid(*forbidden.groups(), problem=problem)
        if text != self._last_error and not self._is_starting:
            logger.log(logging.DEBUG if is_known else logging.WARNING, "bus %s: %s", self.name, text)
        self._last_error = text

    async def _on_disconnect(self) -> None:
        self._online.clear()
        for request in self._requests.values():  # no reply can arrive any more
            if not request.answer.done():
                request.answer.set_result(None)
        if not self._is_starting and not self._is_closing:
            logger.warning("bus %s: connection lost; all requests wait until it is back", self.name)

    async def _on_reconnect(self) -> None:
        _expect_signs_of_life(self._client)
        self.generation += 1
        self._last_error = ""
        self._online.set()
        logger.warning("bus %s: reconnected", self.name)
        self._notify_listeners()

    async def _on_close(self) -> None:
        self._over.set()
        self._online.set()  # wake all waiters, so they notice the end
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in tuple(self._listeners):
            listener()


async def guarded(call: Awaitable[T]) -> T:
    """``await call``. Raises CancelledError if a cancellation arrived during the call, even if the call lost it.

    ``wait_for`` of Python 3.11, which nats-py uses, swallows a cancellation that races with a reply. Remove this with
    support for Python 3.11.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


def new_inbox(prefix: str) -> str:
    return f"{prefix}.{secrets.token_hex(11)}"


def _connect_error(name: str, error: Exception) -> ConfigError:
    """Explain why connecting failed. ``name``: the server's address, without secrets."""
    if isinstance(error, ssl.SSLError):
        return ConfigError(f"bus.url {name}: TLS: {error.reason or error}; see bus.tls_ca")
    if isinstance(error, ValueError) or isinstance(error.__context__, ValueError):  # may quote a password
        return ConfigError(
            f"bus.url {name}: not an address; write nats://HOST:PORT, for a cluster nats://A:PORT,nats://B:PORT"
        )
    return ConfigError(f"bus.url {name}: {error}")


def _require_version(name: str, version: Any) -> None:
    """Raise ConfigError if the server is too old."""
    if (version.major, version.minor) < _OLDEST:
        raise ConfigError(f"bus.url {name}: nats-server {version} is too old; asyncrl needs 2.10")


def _expect_signs_of_life(client: Any) -> None:
    """Set TCP timeouts, because a dead host sends no error. Linux only; elsewhere pings detect a dead host, later."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    writer = getattr(client._transport, "_io_writer", None)
    way = writer.get_extra_info("socket") if writer is not None else None
    if option is not None and way is not None:
        way.setsockopt(socket.IPPROTO_TCP, option, _DEAD_SECONDS * 1000)


def _end_attempt(client: Any) -> None:
    """Close the connection of an attempt to reconnect that failed. nats-py only forgets it. Errors of other tasks have
    nothing to do with an attempt, and change nothing."""
    if client._reconnection_task is not None and asyncio.current_task() is client._reconnection_task:
        client._transport.close()


async def _drain(client: Any, subscription: Any, answered: asyncio.Event) -> None:
    """Drain a subscription, and end it ``_LATE_SECONDS`` after it is drained (``answered``). Raises the errors of
    nats-py, whose own drain ends it at once, so that late messages are lost until ack_seconds are over.

    If a flush times out, nats-py keeps the cancelled future. When a frozen server resumes and sends the late PONG, that
    future would end nats-py's read loop permanently. So a new future takes its place: PONGs come in the order of PINGs.
    """
    try:
        await client._send_unsubscribe(subscription._id)
        await client.flush(_DRAIN_SECONDS)
        await subscription._pending_queue.join()
    finally:
        loop = asyncio.get_running_loop()
        client._pongs[:] = [loop.create_future() if pong.cancelled() else pong for pong in client._pongs]
    answered.set()
    await asyncio.sleep(_LATE_SECONDS)
    await subscription.unsubscribe()
