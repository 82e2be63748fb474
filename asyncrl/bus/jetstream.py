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
import time
import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any, Final, Generic, Literal, TypeVar

from asyncrl.bus.access import Access
from asyncrl.bus.answers import Refused
from asyncrl.bus.connection import Connection
from asyncrl.bus.handover import Each, encoded, opened
from asyncrl.bus.layout import HEADER_BYTES, Layout, reader
from asyncrl.bus.lease import Lease
from asyncrl.bus.lender import GIVE_BACK, Lender
from asyncrl.bus.objects import JetStreamObjects
from asyncrl.bus.pull import Arrival, Pull
from asyncrl.bus.service import Asked, Line, answer_of
from asyncrl.bus.sweep import last_of_each
from asyncrl.bus.watch import Stored, Watch, last_stored
from asyncrl.codec import encode
from asyncrl.errors import BusFull, ConfigError, Forbidden, NoSuchRun, Unanswered
from asyncrl.protocols import Delivery, ObjectStore, Record
from asyncrl.refusals import Refusals
from asyncrl.topics import ALL, Service, Topic

logger = logging.getLogger(__name__)

M = TypeVar("M")
Q = TypeVar("Q")
A = TypeVar("A")

_READ_AHEAD_BYTES: Final = 16 * 2**20  # the server drops a connection that is 64 MiB behind
_READ_AHEAD: Final = 4096
_STORE_FAILED: Final = 10077
_NAME_IN_USE: Final = 10058
_NO_STREAM: Final = 10059
_OTHER_SETTINGS: Final = (10052, _NAME_IN_USE, 10061, 10065, 10069)
"""Invalid for this stream; name in use; replicas that cannot change; subjects of another stream; no such update."""
_LONG_PAUSE: Final = 1.6
_FEW: Final = 8
"""States that are read one by one."""
_IS_GONE: Final = "not found", "no message found"  # errors 10043 and 10057, and 10057 is said for other reasons too
_FEW_PEERS: Final = 10005  # no suitable peers for placement
_NO_PEERS: Final = (_FEW_PEERS, 10074)  # replicas > 1 in non-clustered mode
_PEERS_SECONDS: Final = 30.0
_PEERS_PAUSE_SECONDS: Final = 0.5
_WORD_SECONDS: Final = 5.0
"""How long a server may take for a word about a loan: after an election the new leader may not know of it."""
_NO_ROOM: Final = (10023, 10028, 10047)  # insufficient resources, memory, storage


class JetStreamBus:
    """See ``protocols.Bus``. One connection; any number of actors of one event loop may share it."""

    def __init__(self, connection: Connection, layout: Layout, *, role: str, objects: JetStreamObjects) -> None:
        self._connection, self._layout, self._role, self._objects = connection, layout, role, objects
        self._made: set[str] = set()
        self._is_waiting = False  # for the run's streams
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
    async def consume(self, topic: Topic[M]) -> AsyncIterator[AsyncIterator[Delivery[M]]]:
        lender = Lender(self._connection, stream=await self._stream(topic), config=self._layout.workers())
        held: list[_Delivery[M]] = []

        async def take() -> Delivery[M]:
            delivery = _Delivery(self._connection, await lender.take(), topic, self._layout)
            if delivery.attempt > 1:
                logger.info("%s %s: comes for the %d. time", topic.name, delivery.key, delivery.attempt)
            held[:] = [one for one in held if one.is_ours()] + [delivery]
            return delivery

        try:
            await lender.start()
            yield Each(take)
        finally:
            for delivery in held:
                await delivery.give_back()

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

    async def put(self, topic: Topic[M], message: M, *, key: str = "") -> None:
        data = encoded(message, topic=topic, key=key, limit=self.max_message_bytes)
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

    async def _stream(self, topic: Topic[Any]) -> str:
        """The name of the topic's stream, which is made, or given its new sizes, the first time."""
        name = self._layout.stream(topic)
        if name in self._made:
            return name
        if self._role != "learner":
            await (self._until_made(name) if self._role == "rollout-worker" else self._require(name))
            return name
        config = self._layout.stream_config(topic)
        where = f"bus {self._connection.name}: {name}"
        try:
            await self._make(name, config)
        except Refused as refused:
            if refused.code in _NO_PEERS:
                raise ConfigError(
                    f"{where}: bus.replicas {self._layout.replicas} needs as many servers in one cluster, all of them "
                    f"up and with JetStream ({refused.description}); start them or lower bus.replicas"
                ) from None
            if refused.code in _NO_ROOM:
                raise ConfigError(
                    f"{where}: the server has no room for it ({refused.description}); lower bus.max_log_bytes "
                    f"(now {self._layout.max_log_bytes:,}) or give the server more (max_file_store)"
                ) from None
            if refused.code in _OTHER_SETTINGS:
                raise ConfigError(
                    f"{where}: is there with other settings ({refused.description}); go on with the settings it had "
                    "(bus.storage, bus.replicas) or choose another run.name"
                ) from None
            raise
        self._made.add(name)
        return name

    async def _make(self, name: str, config: dict[str, Any]) -> None:
        """waits for: the servers of a cluster that is just starting"""
        since = time.monotonic()
        while True:
            try:
                await self._connection.api(f"STREAM.CREATE.{name}", config)
                return
            except Refused as refused:
                if refused.code == _NAME_IN_USE:
                    await self._connection.api(f"STREAM.UPDATE.{name}", config)
                    return
                if refused.code != _FEW_PEERS or time.monotonic() - since >= _PEERS_SECONDS:
                    raise
            if not self._is_waiting:
                self._is_waiting = True  # for all streams: one line
                logger.warning(
                    "bus %s: fewer servers are up than bus.replicas = %d; waiting for the others for %.0f s",
                    *(self._connection.name, self._layout.replicas, _PEERS_SECONDS),
                )
            await asyncio.sleep(_PEERS_PAUSE_SECONDS)

    async def _require(self, name: str) -> None:
        """Raises ConfigError, with the runs that are there, when this one is not."""
        try:
            await self._connection.api(f"STREAM.INFO.{name}")
        except Refused as refused:
            if not refused.description.endswith(_IS_GONE):
                raise
            raise NoSuchRun(
                f"bus {self._connection.name}: no run {self._layout.run!r} there; set run.name to one of: "
                f"{await self._runs()}"
            ) from None
        self._made.add(name)

    async def _runs(self) -> str:
        """The runs that are there. Raises Forbidden: a role that may not list them."""
        found = await self._connection.api("STREAM.NAMES", {"subject": "asyncrl.>"})
        runs = {stream.split("-", 1)[1].rpartition("-")[0] for stream in found.get("streams") or ()}
        return ", ".join(sorted(runs)) or "(there is none)"

    async def _until_made(self, name: str) -> None:
        """waits for: the learner, which makes the run's streams"""
        pause, others = 0.05, ""
        while True:
            try:
                await self._connection.api(f"STREAM.INFO.{name}")
                break
            except Refused as refused:
                if refused.code != _NO_STREAM:
                    raise
            if pause == _LONG_PAUSE and not self._is_waiting:
                self._is_waiting = True  # for all streams: one line
                with contextlib.suppress(Forbidden):
                    others = f"; runs there: {await self._runs()}"
                logger.warning(
                    "bus %s: no run %r there yet; waiting for its learner%s",
                    self._connection.name,
                    self._layout.run,
                    others,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONG_PAUSE + 0.1)
        self._made.add(name)


class _Delivery(Generic[M]):
    """A message on loan by one connection.

    A late nak would take it from whoever has it by then: the server does not tell them apart. A server that was killed
    may have forgotten that it lent the message, and the next leader in a cluster may never have heard of it; it leaves
    an ack for it unanswered, so the message is deleted instead.
    One word at a time: a keep that overtakes a retry would have the message wait for ack_seconds
    (test_a_retry_is_not_undone_by_a_keep_in_the_same_moment).
    """

    def __init__(self, connection: Connection, item: Arrival, topic: Topic[M], layout: Layout) -> None:
        self._connection, self._item = connection, item
        self._stream = layout.stream(topic)
        self._ack_seconds = layout.ack_seconds
        self._until = item.time + layout.ack_seconds
        self._content = opened(item.data, topic)
        self._speaking = asyncio.Lock()
        self.key = layout.key(topic, item.subject)
        self.attempt = item.attempt

    @property
    def message(self) -> M | None:
        return self._content.message

    @property
    def problem(self) -> str:
        return self._content.problem

    def is_ours(self) -> bool:
        return time.monotonic() < self._until

    async def ack(self) -> None:
        """Also when somebody else holds it by now: it was done."""
        async with self._speaking:
            try:
                await self._ask(b"+ACK")
            except Unanswered:
                await self._delete()
            self._until = 0.0

    async def retry(self, *, delay: float = 0.0) -> None:
        async with self._speaking:
            if self.is_ours():
                await self._ask_or_tell(GIVE_BACK + b' {"delay": %d}' % int(delay * 1e9))
                self._until = 0.0

    async def keep(self) -> None:
        async with self._speaking:
            if self.is_ours():
                kept = time.monotonic()
                await self._ask_or_tell(b"+WPI")
                self._until = kept + self._ack_seconds

    async def give_back(self) -> None:
        """At once and without an answer: who leaves waits for nobody. Lost, it comes again after ack_seconds."""
        if self.is_ours():
            self._until = 0.0
            await self._tell(GIVE_BACK)

    async def _ask(self, word: bytes) -> None:
        await self._connection.request(self._item.reply, word, only_in=self._item.generation, patience=_WORD_SECONDS)

    async def _tell(self, word: bytes) -> None:
        await self._connection.send(self._item.reply, word, reply="")

    async def _ask_or_tell(self, word: bytes) -> None:
        try:
            await self._ask(word)
        except Unanswered:
            await self._tell(word)  # a server that knows it hears it; one that does not will deliver it again

    async def _delete(self) -> None:
        body = {"seq": self._item.sequence, "no_erase": True}
        try:
            await self._connection.api(f"STREAM.MSG.DELETE.{self._stream}", body)
        except Refused as refused:
            if not refused.description.endswith(_IS_GONE):
                raise


def _fresh(role: str) -> str:
    return f"{role}-{uuid.uuid4().hex}"
