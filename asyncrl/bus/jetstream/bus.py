"""The bus on NATS JetStream.

layout.py defines names and configurations. connection.py handles server restarts.

1. A repeated ``publish``, by this process or a restarted worker, stores once (test_a_key_is_published_once).
2. The messages of a consumer that leaves ``consume`` are redelivered at once; those of a consumer that dies, after
   ack_seconds (test_messages_of_a_consumer_that_leaves_are_redelivered_at_once,
   test_messages_of_a_silent_consumer_are_redelivered_after_ack_seconds).
3. A reader sees every entry of the log once, in order (test_a_restarted_server_is_transparent).
4. Undecodable bytes are delivered with a ``problem`` (test_undecodable_bytes_are_delivered_as_a_problem).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from asyncrl.bus.encoding import Each, encoded, opened
from asyncrl.bus.jetstream.connection import Connection, Refused, dial
from asyncrl.bus.jetstream.consumers import JetStreamDeliveries, ensure_consumer
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.bus.jetstream.kv import Lease, Watch
from asyncrl.bus.jetstream.layout import GONE_SOON, HEADER_BYTES, REMOVED, Layout, is_removed
from asyncrl.bus.jetstream.log import LogReader, PieceStore, Records
from asyncrl.bus.jetstream.objects import JetStreamObjects
from asyncrl.bus.jetstream.streams import (
    StoredMessage,
    Streams,
    batches,
    inspect,
    last_stored,
    leaders_message,
    read_message,
    remove_message,
    require_unchanged,
    subjects,
)
from asyncrl.bus.pieces import Pieces, most_bytes
from asyncrl.bus.port import Deliveries, LogMark, LogState, ObjectStore, Record, Request
from asyncrl.bus.rejections import Rejections
from asyncrl.bus.request_reply import Line, answer_of
from asyncrl.config.addresses import servers
from asyncrl.errors import BusFull
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import ALL, Service, Topic

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")

_STORE_FAILED: Final = 10077


class JetStreamBus:
    """See ``Bus in bus/port.py``. Uses one connection. Any number of actors of one event loop may share it."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        *,
        access: Credentials,
        objects: JetStreamObjects,
        most: int,
    ) -> None:
        """most: largest message in pieces, in bytes"""
        self._connection, self._layout, self._objects = connection, layout, objects
        self._role = access.role
        self._streams = Streams(connection, layout, role=access.role)
        self._stream = self._streams.ensure
        store = PieceStore(connection, layout, stream=self._stream)
        self._pieces = Pieces(self, most=most, fetch=store.fetch, remove=store.remove)
        self.rejections = Rejections()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        run: str,
        token: str = "",
        access: Credentials | None = None,
        max_prompts: int,
        max_log_bytes: int,
        max_group_bytes: int = 2**30,
        ack_seconds: float,
        storage: Literal["file", "memory"],
        replicas: int = 1,
        connect_seconds: float = 10.0,
    ) -> JetStreamBus:
        """Connect to the bus of one run. Raises ConfigError.

        access: our credentials; ``token`` is a shorthand for credentials that are only a token. The learner's role
        creates missing streams. Workers wait for the learner. Observers and operators fail if the run does not exist.
        """
        access = access or Credentials(token=token)
        layout = Layout(
            run=run,
            max_prompts=max_prompts,
            max_log_bytes=max_log_bytes,
            ack_seconds=ack_seconds,
            storage=storage,
            replicas=replicas,
        )

        connect = functools.partial(dial, url, access=access, run=run, seconds=connect_seconds)
        connection = await connect()
        most = most_bytes(max_group_bytes=max_group_bytes, max_log_bytes=max_log_bytes)
        objects = JetStreamObjects(connect, layout)
        bus = cls(connection, layout, access=access, objects=objects, most=most)
        try:
            await bus._streams.open((*ALL, Lease.TOPIC))
            if access.takes_part:
                work = (topic for topic in ALL if topic.kind == "work")
                its = (topic for topic in work if access.role in (*topic.publishers, *topic.readers))
                await asyncio.gather(*map(bus._until_consumable, its))
        except BaseException:
            await connection.close()
            raise
        return bus

    # -- work and logs ----------------------------------------------------------------------------------------------

    async def publish(self, topic: Topic[M], message: M, *, key: str, again: bool = False) -> bool:
        data = await self._pieces.encoded(topic, message, key=key)
        subject, stream = self._layout.subject(topic, key), await self._stream(topic)
        # The server remembers the id of a lost message, so ``again`` needs a new id. A log accepts any key not in it.
        identity = subject if topic.kind == "work" and not again else uuid.uuid4().hex
        headers = {"Nats-Msg-Id": identity, "Nats-Expected-Stream": stream}
        answer = await self._connection.store(subject, data, headers=headers)
        found = answer.found
        if "error" not in found:
            # A repeated publish may find its own first attempt already stored.
            return answer.in_doubt or not found.get("duplicate", False)
        refused = Refused(f"{topic.name} {key}", found["error"])
        if refused.code == _STORE_FAILED and "per subject" in refused.description:
            return answer.in_doubt
        if refused.code == _STORE_FAILED and refused.description.startswith("maximum"):
            raise BusFull(f"{topic.name}: full ({refused.description})")
        raise refused

    async def withdraw(self, topic: Topic[Any], *, key: str) -> None:
        stream, subject = await self._stream(topic), self._layout.subject(topic, key)
        while (stored := await last_stored(self._connection, stream=stream, subject=subject)) is not None:
            await remove_message(self._connection, stream, stored.sequence)

    @contextlib.asynccontextmanager
    async def consume(self, topic: Topic[M]) -> AsyncIterator[Deliveries[M]]:
        await self._stream(topic)
        deliveries = JetStreamDeliveries(
            self._connection,
            topic,
            self._layout,
            ready=functools.partial(self._until_consumable, topic),
        )
        try:
            await deliveries.start()
            yield deliveries
        finally:
            await deliveries.end()

    async def _until_consumable(self, topic: Topic[Any]) -> None:
        """waits for: the learner, which makes the consumer that all workers share"""
        await ensure_consumer(self._connection, self._layout, self._layout.stream(topic), role=self._role)

    @contextlib.asynccontextmanager
    async def read(self, topic: Topic[M], *, after: int = 0) -> AsyncIterator[AsyncIterator[Record[M]]]:
        stream = await self._stream(topic)
        created, is_learner = str(self._streams.known[stream]["created"]), self._role == "learner"

        async def look(mark: LogMark) -> dict[str, Any]:
            """Return the state of the log. In the learner, raise BusLost if it is not the log that was read."""
            if not is_learner:
                return dict((await self._info(topic))["state"])
            mark = dataclasses.replace(mark, log=created)
            info = await require_unchanged(self._connection, stream, mark, replicas=self._layout.replicas)
            return dict(info["state"])

        async def find(sequence: int) -> StoredMessage | None:
            # Other roles get answers only as JSON, which the leader gives (nats_server/rights.py).
            if is_learner:
                return await read_message(self._connection, stream, sequence)
            return await leaders_message(self._connection, stream, {"seq": sequence})

        source = LogReader(
            self._connection,
            stream=stream,
            after=after,
            find=find,
            look=look,
            republished=self._layout.republish_subject(topic) if is_learner else "",
        )
        records = Records(
            source,
            topic,
            key_of=functools.partial(self._layout.key, topic),
            pieces=self._pieces,
            first_sequence=functools.partial(self._first_sequence, topic),
        )
        try:
            await source.start()
            yield Each(records.take)
        finally:
            await source.stop()

    async def log_state(self, topic: Topic[Any], *, mark: LogMark) -> LogState:
        info, problem = await inspect(self._connection, await self._stream(topic), mark)
        first = max(1, int(info["state"]["first_seq"]))  # 0 before the first entry
        return LogState(identity=str(info["created"]), first=first, problem=problem)

    async def trim(self, topic: Topic[Any], *, through: int, is_over: Callable[[str], bool] | None = None) -> None:
        through = min(through, await self.last_sequence(topic))  # purging beyond the end would also move the end
        if through > 0:
            await self._connection.api(f"STREAM.PURGE.{await self._stream(topic)}", {"seq": through + 1})
        await self._pieces.tidy(topic, is_over=is_over)

    async def check(self) -> None:
        await self._streams.check(has_objects=self._objects.is_created)

    async def depth(self, topic: Topic[Any]) -> int:
        return int((await self._info(topic))["state"]["messages"])

    async def keys(self, topic: Topic[Any]) -> set[str]:
        return {self._layout.key(topic, subject) for subject in await self._subjects(topic)}

    async def last_sequence(self, topic: Topic[Any]) -> int:
        return int((await self._info(topic))["state"]["last_seq"])

    async def _first_sequence(self, topic: Topic[Any]) -> int:
        return int((await self._info(topic))["state"]["first_seq"])

    # -- states -----------------------------------------------------------------------------------------------------

    async def put(self, topic: Topic[M], message: M, *, key: str = "", is_sure: bool = True) -> None:
        data = self._encoded(topic, message, key)
        if not is_sure:
            await self._stream(topic)
            await self._connection.online()
            await self._connection.send(self._layout.subject(topic, key), data, reply="")
            return
        await self._set(topic, key, data, {})

    @contextlib.asynccontextmanager
    async def watch(self, topic: Topic[M], *, key: str = "") -> AsyncIterator[AsyncIterator[M]]:
        watch = Watch(
            self._connection,
            stream=await self._stream(topic),
            subject=self._layout.subject(topic, key),
            republished=self._layout.republish_subject(topic, key),
        )

        async def take() -> M:
            while True:
                stored = await watch.take()
                if (message := self._value(topic, key, stored.data, stored.headers)) is not None:
                    return message

        try:
            await watch.start()
            yield Each(take)
        finally:
            await watch.stop()

    async def states(self, topic: Topic[M], *, under: str = "") -> dict[str, M]:
        found: dict[str, M] = {}
        subjects = await self._subjects(topic, under=under)
        for some in batches(subjects):
            lasts = await asyncio.gather(*(self._last(topic, subject) for subject in some))
            for subject, last in zip(some, lasts, strict=True):
                key = self._layout.key(topic, subject)
                if last is None:
                    continue
                if (message := self._value(topic, key, last.data, last.headers)) is not None:
                    found[key] = message
        return found

    async def _last(self, topic: Topic[Any], subject: str) -> StoredMessage | None:
        """Return the last message of a subject; None if there is none.

        States without expiry are read from the stream's leader. Other servers of a cluster may lag, and a starting
        process must not see a finished run or an older incarnation (test_a_server_that_is_behind_...).
        """
        stream = await self._stream(topic)
        if topic.seconds_to_live and self._role in ("learner", "rollout-worker"):
            answer = await self._connection.request(f"$JS.API.DIRECT.GET.{stream}.{subject}")
            if answer.headers.get("Status") is not None:
                return None  # 404: gone
            return StoredMessage(int(answer.headers["Nats-Sequence"]), answer.data, answer.headers)
        return await last_stored(self._connection, stream=stream, subject=subject)

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        # No purge: permission to purge a part of a stream includes permission to purge all of it.
        keys = [key]
        if key.endswith("/"):
            keys = [self._layout.key(topic, subject) for subject in await self._subjects(topic, under=key)]
        headers = REMOVED | (GONE_SOON if topic.seconds_to_live else {})
        for some in batches(keys):
            await asyncio.gather(*(self._set(topic, one, b"", headers) for one in some))

    def _encoded(self, topic: Topic[M], message: M, key: str) -> bytes:
        return encoded(message, topic=topic, key=key, limit=self.max_message_bytes)

    def _value(self, topic: Topic[M], key: str, data: bytes, headers: Collection[str]) -> M | None:
        """Decode a state; None if it was removed or does not decode."""
        if is_removed(headers):
            return None
        content = opened(data, topic, key=key)
        if content.message is None:
            self.rejections.note(topic.name, f"state {key!r}: {content.problem}")
        return content.message

    async def _set(self, topic: Topic[Any], key: str, data: bytes, headers: Mapping[str, str]) -> None:
        # Unique id: a request that the connection repeats is stored once and does not overwrite a newer message.
        headers = {**headers, "Nats-Expected-Stream": await self._stream(topic), "Nats-Msg-Id": uuid.uuid4().hex}
        found = (await self._connection.store(self._layout.subject(topic, key), data, headers=headers)).found
        if "error" in found:
            raise Refused(f"{topic.name} {key}", found["error"])

    # -- services ----------------------------------------------------------------------------------------------------

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        data = await self._connection.ask(self._layout.service(service), encode(question), seconds=seconds)
        return None if data is None else answer_of(data, service, self.rejections)

    @contextlib.asynccontextmanager
    async def serve(self, service: Service[Q, A]) -> AsyncIterator[AsyncIterator[Request[Q, A]]]:
        line = Line(service, self.rejections)

        async def on_message(message: Any) -> None:
            async def send(data: bytes) -> None:
                await self._connection.send(message.reply, data, reply="")

            line.add(message.data, send)

        subscription = await self._connection.subscribe(self._layout.service(service), on_message)
        await self._connection.api("INFO")  # once the server replies, our subscription is active
        try:
            yield Each(line.take)
        finally:
            await self._connection.unsubscribe(subscription, drain=False)

    # -- all --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, name: str, *, holder: str) -> AsyncIterator[None]:
        lease = Lease(
            self._connection,
            self._layout,
            stream=await self._stream(Lease.TOPIC),
            name=name,
            holder=holder,
            role=self._role,
        )
        await lease.take()
        try:
            yield
        finally:
            await lease.release()

    def objects(self) -> ObjectStore:
        return self._objects

    @property
    def own_address(self) -> str:
        server = urlsplit(servers(self._connection.name)[0]).hostname or "127.0.0.1"
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((server, 9))  # sends nothing, but selects the interface that routes there
                return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"

    @property
    def max_message_bytes(self) -> int:
        return self._connection.max_payload - HEADER_BYTES

    async def close(self) -> None:
        await asyncio.to_thread(self._objects.close)
        await self._connection.close()

    async def _info(self, topic: Topic[Any]) -> dict[str, Any]:
        return await self._connection.api(f"STREAM.INFO.{await self._stream(topic)}")

    async def _subjects(self, topic: Topic[Any], *, under: str = "") -> list[str]:
        stream = await self._stream(topic)
        return list(await subjects(self._connection, stream, matching=self._layout.under(topic, under)))
