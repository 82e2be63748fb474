"""One connection to a nats-server, or to a cluster of them: requests that outlive its restart, and subscriptions.

The only file that imports nats.

1. A cancellation is never lost: every nats call goes through ``guarded`` (cancelling.py).
2. While the server is away every call waits; when it is back, what was not answered is sent again
   (test_a_restarted_server_is_transparent). Message ids make the repetition harmless. The same while a cluster elects
   a leader for a stream whose leader died, which takes four to ten seconds (tests/test_nats_cluster.py).
   A way that is slow is no server that is dead: what is asked again is given time to get there, and a connection that
   still carries is kept (test_a_slow_way_is_given_the_time_that_a_message_takes).
3. Nobody waits for ever on a server that is there and does not answer: BusError after a minute.
4. What an acked call promises has been counted by the server when it returns: acks are requests, not notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import nats.errors
from nats.aio.client import Client

from asyncrl.bus.answers import BUSY, IN_PROCESS, Answer, Busy, Nobody, Refused, Stored
from asyncrl.bus.cancelling import guarded
from asyncrl.config.addresses import servers, without_secrets
from asyncrl.errors import BusError, ConfigError, Forbidden, NoAnswer, Unanswered

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 5.0
"""Then it is asked again: the server that was to answer may be dead, and another one have its streams by now."""
_SLOW_BYTES_PER_SECOND: Final = 32 * 2**10
"""A way so slow is still waited for: what was sent and is not answered adds its time to the above."""
_PING_SECONDS: Final = 5
_DEAD_SECONDS: Final = 15
"""The kernel gives up a connection of which nothing was acknowledged for so long, pings included."""
_FROZEN_SECONDS: Final = 60
"""A server whose kernel acknowledges and who says nothing; longer, as pings wait behind messages on a slow way."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_LAST_PAUSE_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 60.0
_NOBODY_SECONDS: Final = 30.0
"""How long a request that nobody takes is repeated: a server that has just started may still open its streams, and a
cluster may elect who leads them."""
_LEAVE_SECONDS: Final = 5.0
_OLDEST: Final = (2, 10)
_FORBIDDEN: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_PASSING: Final = (
    TimeoutError,
    OSError,
    nats.errors.ConnectionClosedError,  # for good, as the next look at the connection will say
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
)


class Connection:
    """A nats client that waits and asks again. A ``pull.Wire``."""

    def __init__(self, url: str) -> None:
        self._client: Any = Client()
        self.name = without_secrets(url)
        self.generation = 0
        self._online = asyncio.Event()
        self._over = asyncio.Event()
        self._is_starting = True
        self._is_closing = False
        self._nobody_seconds = 0.0
        self._said = ""
        self._inbox = ""
        self._no_answers = ""  # why none can come
        self._numbers = itertools.count(1)
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._asked: dict[str, str] = {}  # number -> subject, in lower case
        self._unanswered_bytes = 0
        self._num_busy = 0  # requests that wait for a JetStream that cannot answer now
        self._listeners: set[Callable[[], None]] = set()
        self._leaving: set[asyncio.Future[None]] = set()

    async def open(self, url: str, *, options: Mapping[str, Any], inbox: str, seconds: float) -> None:
        """``options``: access.Access's. Raises ConfigError: nobody there, wrong token, no JetStream, an old
        server; BusError: a cluster without a quorum."""
        addresses = servers(url)
        try:
            async with asyncio.timeout(seconds):
                await guarded(
                    self._client.connect(
                        addresses,
                        **options,
                        inbox_prefix=inbox,
                        name="asyncrl",
                        error_cb=self._on_error,
                        disconnected_cb=self._on_disconnect,
                        reconnected_cb=self._on_reconnect,
                        closed_cb=self._on_close,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=0.25,
                        connect_timeout=seconds / (len(addresses) + 1),  # time for the others when one is no more
                        ping_interval=_PING_SECONDS,
                        max_outstanding_pings=_FROZEN_SECONDS // _PING_SECONDS,
                    )
                )
        except TimeoutError:
            raise NoAnswer(
                f"bus.url {self.name}: nobody answers ({self._said or 'no route'}); "
                f"start `nats-server -js` there or leave bus.url empty"
            ) from None
        except ConfigError:
            raise
        except (nats.errors.Error, ValueError) as error:
            if isinstance(error, ValueError) or isinstance(error.__context__, ValueError):  # may quote a password
                raise ConfigError(
                    f"bus.url {self.name}: is no address; write nats://HOST:PORT, for a cluster "
                    "nats://A:PORT,nats://B:PORT"
                ) from None
            raise ConfigError(f"bus.url {self.name}: {error}") from None
        except ssl.SSLError as error:
            raise ConfigError(f"bus.url {self.name}: TLS: {error.reason or error}; see bus.tls_ca") from None
        finally:
            self._is_starting = False
        self._expect_signs_of_life()
        self._online.set()
        self._inbox = self._client.new_inbox()
        await self.subscribe(f"{self._inbox}.*", self._on_answer)
        version = self._client.connected_server_version
        if (version.major, version.minor) < _OLDEST:
            raise ConfigError(f"bus.url {self.name}: nats-server {version} is too old; asyncrl needs 2.10")
        try:
            await self.api("INFO")
        except Forbidden as error:
            raise ConfigError(str(error)) from None
        except (Nobody, Refused) as error:
            raise ConfigError(
                f"bus.url {self.name}: JetStream is off there ({error}); start the server as `nats-server -js`"
            ) from None
        self._nobody_seconds = _NOBODY_SECONDS

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    async def close(self) -> None:
        if not self._client.servers:
            return  # the url was none: nothing was ever opened
        self._is_closing = True
        with contextlib.suppress(nats.errors.Error, OSError):
            await guarded(self._client.close())

    # -- asking ---------------------------------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        only_in: int | None = None,
        patience: float = _PATIENCE_SECONDS,
    ) -> Answer:
        """The answer, asked again for as long as it takes the server to come back. Raises BusError.

        only_in   a generation: once there is a newer one nobody can answer any more, which raises Unanswered
        patience  seconds for a server that is there, which then raises Unanswered
        """
        pause, asked = _FIRST_PAUSE_SECONDS, 0
        generation, since = self.generation, time.monotonic()
        while True:
            await self.online()
            if only_in not in (None, self.generation):
                raise Unanswered(f"bus {self.name}: connected anew since {subject} was made")
            if generation != self.generation:
                generation, since = self.generation, time.monotonic()
            message = await self._ask(subject, data, headers)
            asked += 1
            is_nobody = message is not None and (message.headers or {}).get("Status") == "503"
            if message is not None and not is_nobody:
                return Answer(message.data, message.headers or {}, asked > 1)
            waited = time.monotonic() - since
            if not self._over.is_set() and waited >= min(patience, self._nobody_seconds if is_nobody else patience):
                if is_nobody:
                    raise Nobody(f"bus {self.name}: nothing takes {subject} there; was the server's store removed?")
                raise Unanswered(
                    f"bus {self.name}: no answer at {subject} for {waited:.0f} s; "
                    f"is the server's disk full? Its log says"  # it answers nothing then
                )
            await self._rest(pause)  # back off: a server that is busy gets no busier
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    async def ask(self, subject: str, data: bytes, *, seconds: float) -> bytes | None:
        """The answer of another client, asked once; None when nobody listens there, or it takes too long."""
        try:
            async with asyncio.timeout(seconds):
                await self.online()
                message = await self._ask(subject, data, None, seconds=seconds)
        except TimeoutError:
            return None
        if message is None or (message.headers or {}).get("Status") == "503":
            return None
        return bytes(message.data)

    async def api(
        self, verb: str, body: Mapping[str, Any] | None = None, *, patience: float = _PATIENCE_SECONDS
    ) -> dict[str, Any]:
        """One request of the JetStream API. Raises Refused, and Unanswered as ``request``."""
        answer = await self.store(f"$JS.API.{verb}", json.dumps(body).encode() if body else b"", patience=patience)
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
    ) -> Stored:
        """JetStream's answer, which may be an error, but none that passes: then it is asked again for a minute.

        Raises Busy after that, and Unanswered as ``request``.
        """
        pause, since, in_doubt, is_slow = _FIRST_PAUSE_SECONDS, time.monotonic(), False, False
        try:
            while True:
                answer = await self.request(subject, data, headers=headers, patience=patience)
                in_doubt |= answer.in_doubt
                found: dict[str, Any] = json.loads(answer.data)
                code = found.get("error", {}).get("err_code")
                if code not in BUSY:
                    return Stored(found, in_doubt)
                if time.monotonic() - since >= _PATIENCE_SECONDS:
                    raise Busy(f"bus {self.name}: {subject}", found["error"])
                in_doubt |= code != IN_PROCESS
                if pause == _LAST_PAUSE_SECONDS and not is_slow:
                    is_slow = True
                    self._num_busy += 1
                    if self._num_busy == 1:  # one line for all that wait
                        description = found["error"].get("description")
                        logger.warning("bus %s: %s: %s; asking again for a minute", self.name, subject, description)
                await self._rest(pause)
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
        finally:
            self._num_busy -= is_slow

    async def _rest(self, seconds: float) -> None:
        """waits for: the clock, the end of the connection"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        """A message that may be lost: who sends it notices when nothing comes back."""
        with contextlib.suppress(nats.errors.Error, OSError):
            await guarded(self._client.publish(subject, data, reply=reply))

    async def _ask(self, subject: str, data: bytes, headers: Mapping[str, str] | None, *, seconds: float = 0.0) -> Any:
        """The answer, or None when there is none: too late, or the connection went.  seconds: 0 is what is usual"""
        if self._no_answers:
            raise Forbidden(self._no_answers)
        number = str(next(self._numbers))
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._asked[number] = subject.lower()
        self._unanswered_bytes += len(data)
        try:
            reply = f"{self._inbox}.{number}"
            await guarded(self._client.publish(subject, data, reply=reply, headers=headers))
            async with asyncio.timeout(seconds or _ANSWER_SECONDS + self._unanswered_bytes / _SLOW_BYTES_PER_SECOND):
                return await future
        except _PASSING:
            return None
        except nats.errors.Error as error:  # too large for a server that was changed, say: no repetition helps
            raise BusError(f"bus {self.name}: {subject}: {error}") from error
        finally:
            del self._answers[number], self._asked[number]
            self._unanswered_bytes -= len(data)

    # -- listening ------------------------------------------------------------------------------------------------

    def inbox(self) -> str:
        return str(self._client.new_inbox())

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]], *, queue: str = "") -> Any:
        """``queue``: of all who subscribe with that name, one gets each message."""
        await self.online()
        return await guarded(self._client.subscribe(subject, queue=queue, cb=on_message))

    async def unsubscribe(self, subscription: Any, *, drain: bool) -> None:
        """Leave; with ``drain``, what is on its way still arrives. A cancelled caller does not cancel the leaving:

        nats-py keeps the future of a cancelled flush, and the next PONG then ends its read loop for good.
        """
        is_here = self._online.is_set() and not self._over.is_set()
        leaving = asyncio.ensure_future(subscription.drain() if drain and is_here else subscription.unsubscribe())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._left)
        await asyncio.wait((leaving,), timeout=_LEAVE_SECONDS)

    def _left(self, leaving: asyncio.Future[None]) -> None:
        self._leaving.discard(leaving)
        error = None if leaving.cancelled() else leaving.exception()
        if error is not None and not isinstance(error, (nats.errors.Error, OSError, TimeoutError)):
            logger.error("bus %s: leaving a subscription: %r", self.name, error)

    async def online(self) -> None:
        await self._online.wait()
        if self._over.is_set():
            raise BusError(f"bus {self.name}: the connection is closed ({self._client.last_error or 'by us'})")

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._listeners.add(on_change)
        return lambda: self._listeners.discard(on_change)

    async def _on_answer(self, message: Any) -> None:
        future = self._answers.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        """Also ends the client's own task that reconnects: it loses a cancellation that comes as a try fails (as
        asyncio.wait_for does), and would go on for ever behind ``close``."""
        task = asyncio.current_task()
        if self._is_closing and task is not None and task.cancelling():
            raise asyncio.CancelledError
        text = str(error) or type(error).__name__
        if self._is_starting and "authorization" in text.lower():
            raise ConfigError(
                f"bus.url {self.name}: the server refuses the token or password; set bus.token, ASYNCRL_BUS_TOKEN or "
                "bus.credentials to its own"
            )
        is_known = isinstance(error, (OSError, nats.errors.StaleConnectionError))  # "connection lost" said it
        if (forbidden := _FORBIDDEN.search(text.lower())) is not None:
            is_known = self._forbid(*forbidden.groups(), text=text)
        if text != self._said and not self._is_starting:
            logger.log(logging.DEBUG if is_known else logging.WARNING, "bus %s: %s", self.name, text)
        self._said = text

    def _forbid(self, what: str, subject: str, *, text: str) -> bool:
        """Who asked there hears it at once: no answer will come. nats-py gives the subject in lower case.

        False when nobody did, and so nobody has heard it.
        """
        problem = f"bus {self.name}: {text}; bus.credentials or bus.token are of a role or run that may not do this"
        is_inbox = what == "subscription" and subject == f"{self._inbox}.*".lower()
        if is_inbox:
            self._no_answers = problem
        has_heard = False
        for number, asked in self._asked.items():
            if (is_inbox or (what == "publish" and asked == subject)) and not self._answers[number].done():
                self._answers[number].set_exception(Forbidden(problem))
                has_heard = True
        return has_heard

    async def _on_disconnect(self) -> None:
        self._online.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_result(None)  # its answer cannot come any more
        if not self._is_starting and not self._is_closing:
            logger.warning("bus %s: connection lost; everybody waits until it is back", self.name)

    def _expect_signs_of_life(self) -> None:
        """Of a host that is gone nothing tells but silence (Linux; elsewhere the pings do, later)."""
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        writer = getattr(self._client._transport, "_io_writer", None)
        way = writer.get_extra_info("socket") if writer is not None else None
        if option is not None and way is not None:
            way.setsockopt(socket.IPPROTO_TCP, option, _DEAD_SECONDS * 1000)

    async def _on_reconnect(self) -> None:
        self._expect_signs_of_life()
        self.generation += 1
        self._said = ""
        self._online.set()
        logger.warning("bus %s: connected again", self.name)
        self._tell()

    async def _on_close(self) -> None:
        self._over.set()
        self._online.set()  # whoever waits shall hear it
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
