"""Opens a run's object store in a process without a bus: another rank of the learner, which stores its own part."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.bus.jetstream.connection import Connection
from asyncrl.bus.jetstream.credentials import Credentials, answers, inbox
from asyncrl.bus.jetstream.layout import Layout
from asyncrl.bus.jetstream.objects import JetStreamObjects
from asyncrl.messages.codec import decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a run's object store, with the credentials. Sent only to the learner's own ranks."""

    url: str
    run: str
    access: Credentials
    storage: str
    replicas: int
    connect_seconds: float


async def open_as(connection: Connection, url: str, *, access: Credentials, run: str, seconds: float) -> None:
    """Connect with our credentials. Close the connection on failure. Raises ConfigError."""
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
    connection.awaits_streams = access.role in ("learner", "rollout-worker")


def objects_of(url: str, layout: Layout, *, access: Credentials, connect_seconds: float) -> JetStreamObjects:
    """Return the object store of a run, with its own connection."""

    async def dial() -> Connection:
        connection = Connection(url)
        await open_as(connection, url, access=access, run=layout.run, seconds=connect_seconds)
        return connection

    address = Address(
        url=url,
        run=layout.run,
        access=access,
        storage=layout.storage,
        replicas=layout.replicas,
        connect_seconds=connect_seconds,
    )
    return JetStreamObjects(dial, layout, elsewhere=(f"{__name__}:opened", encode(address)))


def opened(payload: bytes) -> JetStreamObjects:
    """See ObjectStore.elsewhere. The process that sent the address has created the store. So nothing in it is removed
    as left over: another rank may be writing it."""
    address = decode(payload, Address)
    layout = Layout(
        run=address.run,
        max_prompts=1,
        max_log_bytes=1,
        ack_seconds=1.0,
        storage="memory" if address.storage == "memory" else "file",
        replicas=address.replicas,
    )
    store = objects_of(address.url, layout, access=address.access, connect_seconds=address.connect_seconds)
    store.is_made = True
    return store
