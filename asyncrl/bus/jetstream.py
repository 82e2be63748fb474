"""The bus on NATS JetStream.

Where things lie is in layout.py; what makes them outlive a restarted server, in connection.py and pull.py.

1. ``publish`` repeated by us or by a restarted worker stores once (test_a_key_is_published_once).
2. Who leaves ``consume`` gives back at once what it held; who dies, after ack_seconds
   (test_a_lost_consumer_gives_its_messages_back, test_a_silent_consumer_loses_its_messages).
3. A reader sees every entry of the log once, in order (test_a_restarted_server_is_transparent).
4. Bytes that are no message are handed over as a problem (test_undecodable_bytes_are_delivered_as_a_problem).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any, Final, Literal, TypeVar

from asyncrl.bus.access import Access
from asyncrl.bus.answers import Refused
from asyncrl.bus.connection import Connection
from asyncrl.bus.handover import Each, encoded, opened
from asyncrl.bus.layout import HEADER_BYTES, Layout, reader
from asyncrl.bus.lease import Lease
from asyncrl.bus.loans import Loans
from asyncrl.bus.objects import JetStreamObjects
from asyncrl.bus.pull import Pull
from asyncrl.bus.service import Asked, Line, answer_of
from asyncrl.bus.streams import Streams
from asyncrl.bus.sweep import last_of_each
from asyncrl.bus.watch import Stored, Watch, last_stored
from asyncrl.codec import encode
from asyncrl.errors import BusFull
from asyncrl.protocols import Deliveries, ObjectStore, Record
from asyncrl.refusals import Refusals
from asyncrl.topics import ALL, Service, Topic

logger = logging.getLogger(__name__)

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")

_READ_AHEAD_BYTES: Final = 16 * 2**20  # the server drops a connection that is 64 MiB behind
_READ_AHEAD: Final = 4096
_STORE_FAILED: Final = 10077
_FEW: Final = 8
"""States that are read one by one."""


class JetStreamBus:
    """See ``protocols.Bus``. One connection; any number of actors of one event loop may share it."""

    def __init__(self, connection: Connection, layout: Layout, *, role: str, objects: JetStreamObjects) -> None:
        self._connection, self._layout, self._role, self._objects = connection, layout, role, objects
        streams = Streams(connection, layout, role=role)
        self._stream, self._made = streams.of, streams.made
        self.refusals = Refusals()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        run: str,
        token: str = "",
        access: Access | None = None,
        max_prompts: int,
        max_log_bytes: int,
        ack_seconds: float,
        storage: Literal["file", "memory"],
        replicas: int = 1,
        connect_seconds: float = 10.0,
    ) -> JetStreamBus:
        """The bus of one run on a server. Raises ConfigError.

        access: who we are there; ``token`` is short for one that has nothing else. The learner's role makes the topics
        that are not there; workers wait until it has; observers and operators make nothing, and find the run or do not.
        """
        access = access or Access(token=token)
        connection = Connection(url)
        layout = Layout(
            run=run,
            max_prompts=max_prompts,
            max_log_bytes=max_log_bytes,
            ack_seconds=ack_seconds,
            storage=storage,
            replicas=replicas,
        )

        async def open_it(it: Connection) -> Connection:
            try:
                await it.open(url, options=access.options(), inbox=access.inbox(run), seconds=connect_seconds)
            except BaseException:
                await it.close()
                raise
            return it

        objects = JetStreamObjects(lambda: open_it(Connection(url)), layout)
        bus = cls(connection, layout, role=access.role, objects=objects)
        try:
            await open_it(connection)
            topics = {layout.stream(topic): topic for topic in (*ALL, Lease.TOPIC)}
            await asyncio.gather(*(bus._stream(topic) for topic in topics.values()))  # one round trip, not one each
        except BaseException:
            await connection.close()
            raise
        return bus

    # -- work and logs ----------------------------------------------------------------------------------------------

    async def publish(self, topic: Topic[M], message: M, *, key: str) -> bool:
        data = encoded(message, topic=topic, key=key, limit=self.max_message_bytes)
        subject, stream = self._layout.subject(topic, key), await self._stream(topic)
        headers = {"Nats-Msg-Id": subject, "Nats-Expected-Stream": stream}
        answer = await self._connection.store(subject, data, headers=headers)
        found = answer.found
        if "error" not in found:
            # A repeated publish may meet what it stored itself the first time.
            return answer.in_doubt or not found.get("duplicate", False)
        refused = Refused(f"{topic.name} {key}", found["error"])
        if refused.code == _STORE_FAILED and "per subject" in refused.description:
            return answer.in_doubt
        if refused.code == _STORE_FAILED and refused.description.startswith("maximum"):
            raise BusFull(f"{topic.name}: full ({refused.description})")
        raise refused

    @contextlib.asynccontextmanager
    async def consume(self, topic: Topic[M]) -> AsyncIterator[Deliveries[M]]:
        loans = Loans(self._connection, topic, self._layout, stream=await self._stream(topic))
        try:
            await loans.start()
            yield loans
        finally:
            await loans.end()

    @contextlib.asynccontextmanager
    async def read(self, topic: Topic[M], *, after: int = 0) -> AsyncIterator[AsyncIterator[Record[M]]]:
        pull = Pull(
            self._connection,
            stream=await self._stream(topic),
            create=lambda last: reader(_fresh("reader"), after=max(after, last)),
            batch=_READ_AHEAD,
            max_bytes=max(_READ_AHEAD_BYTES, 2 * self._connection.max_payload),
        )

        async def take() -> Record[M]:
            item = await pull.take()
            content = opened(item.data, topic)
            return Record(
                sequence=item.sequence,
                key=self._layout.key(topic, item.subject),
                message=content.message,
                problem=content.problem,
                num_bytes=len(item.data),
            )

        try:
            await pull.start()
            yield Each(take)
        finally:
            await pull.stop()

    async def trim(self, topic: Topic[Any], *, through: int) -> None:
        # Purging beyond the end would also move the end.
        through = min(through, await self.last_sequence(topic))
        if through > 0:
            await self._connection.api(f"STREAM.PURGE.{await self._stream(topic)}", {"seq": through + 1})

    async def depth(self, topic: Topic[Any]) -> int:
        return int((await self._info(topic))["state"]["messages"])

    async def keys(self, topic: Topic[Any]) -> set[str]:
        return {self._layout.key(topic, subject) for subject in await self._subjects(topic)}

    async def last_sequence(self, topic: Topic[Any]) -> int:
        return int((await self._info(topic))["state"]["last_seq"])

    # -- states -----------------------------------------------------------------------------------------------------

    async def put(self, topic: Topic[M], message: M, *, key: str = "", is_sure: bool = True) -> None:
        data = encoded(message, topic=topic, key=key, limit=self.max_message_bytes)
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
            told=self._layout.told(topic, key),
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
        # A worker may make no consumer there; and one of a cluster's consumers may be at a server that is behind, which
        # is no matter for what is gone in seconds anyway (see _last).
        if len(subjects) > _FEW and topic.seconds_to_live and self._role != "rollout-worker":
            stream = await self._stream(topic)
            for item in await last_of_each(self._connection, stream=stream, subjects=self._layout.under(topic, under)):
                key = self._layout.key(topic, item.subject)
                if (message := self._value(topic, key, item.data, item.headers)) is not None:
                    found[key] = message
            return found
        for subject in subjects:
            key, last = self._layout.key(topic, subject), await self._last(topic, subject)
            if last is not None and (message := self._value(topic, key, last.data, last.headers)) is not None:
                found[key] = message
        return found

    async def _last(self, topic: Topic[Any], subject: str) -> Stored | None:
        """The last message of a subject; None when there is none.

        What is kept without an end is asked of the leader: other servers of a cluster may be behind, and who starts
        must not meet a run that was finished, or the run epoch before the last (test_a_server_that_is_behind_...).
        """
        stream = await self._stream(topic)
        if topic.seconds_to_live:
            answer = await self._connection.request(f"$JS.API.DIRECT.GET.{stream}.{subject}")
            if answer.headers.get("Status") is not None:
                return None  # 404: gone
            return Stored(int(answer.headers["Nats-Sequence"]), answer.data, answer.headers)
        return await last_stored(self._connection, stream=stream, subject=subject)

    async def forget(self, topic: Topic[Any], *, key: str) -> None:
        if key.endswith("/"):
            body = {"filter": self._layout.under(topic, key)}
            await self._connection.api(f"STREAM.PURGE.{await self._stream(topic)}", body)
            return
        await self._set(topic, key, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"})

    def _value(self, topic: Topic[M], key: str, data: bytes, headers: Collection[str]) -> M | None:
        """None when the state was removed, or is none."""
        if "KV-Operation" in headers or "Nats-Marker-Reason" in headers:
            return None
        content = opened(data, topic)
        if content.message is None:
            self.refusals.note(topic.name, f"state {key!r}: {content.problem}")
        return content.message

    async def _set(self, topic: Topic[Any], key: str, data: bytes, headers: dict[str, str]) -> None:
        headers["Nats-Expected-Stream"] = await self._stream(topic)
        found = (await self._connection.store(self._layout.subject(topic, key), data, headers=headers)).found
        if "error" in found:
            raise Refused(f"{topic.name} {key}", found["error"])

    # -- services ----------------------------------------------------------------------------------------------------

    async def ask(self, service: Service[Q, A], question: Q, *, seconds: float) -> A | None:
        data = await self._connection.ask(self._layout.service(service), encode(question), seconds=seconds)
        return None if data is None else answer_of(data, service, self.refusals)

    @contextlib.asynccontextmanager
    async def serve(self, service: Service[Q, A]) -> AsyncIterator[AsyncIterator[Asked[Q, A]]]:
        line = Line(service, self.refusals)

        async def on_message(message: Any) -> None:
            async def send(data: bytes) -> None:
                await self._connection.send(message.reply, data, reply="")

            line.add(message.data, send)

        subscription = await self._connection.subscribe(self._layout.service(service), on_message)
        await self._connection.api("INFO")  # its answer comes behind our subscription: who asks now finds us
        try:
            yield Each(line.take)
        finally:
            await self._connection.unsubscribe(subscription, drain=False)

    # -- all --------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, name: str, *, holder: str) -> AsyncIterator[None]:
        stream = await self._stream(Lease.TOPIC)
        lease = Lease(self._connection, self._layout, stream=stream, name=name, holder=holder)
        await lease.take()
        try:
            yield
        finally:
            await lease.release()

    def objects(self) -> ObjectStore:
        return self._objects

    @property
    def max_message_bytes(self) -> int:
        return self._connection.max_payload - HEADER_BYTES

    async def close(self) -> None:
        await asyncio.to_thread(self._objects.close)
        await self._connection.close()

    async def _info(self, topic: Topic[Any]) -> dict[str, Any]:
        return await self._connection.api(f"STREAM.INFO.{await self._stream(topic)}")

    async def _subjects(self, topic: Topic[Any], *, under: str = "") -> list[str]:
        """Subjects that hold a message; the server answers with at most 100,000 of them at a time."""
        verb = f"STREAM.INFO.{await self._stream(topic)}"
        found: list[str] = []
        while True:
            body = {"subjects_filter": self._layout.under(topic, under), "offset": len(found)}
            page = await self._connection.api(verb, body)
            subjects = page["state"].get("subjects") or {}
            found += subjects
            if not subjects or len(found) >= page.get("total", 0):
                return found


def _fresh(role: str) -> str:
    return f"{role}-{uuid.uuid4().hex}"
