"""What each role may do on a nats-server, derived from the topics (messages/topics.py). Pure.

A rollout worker, or a server of a frozen model, publishes only under keys that begin with its name, so nobody writes in
another's name.

accounts.py turns the rights into accounts and permissions. tests/integration/security/test_roles.py tries everything
that is not in ``table``, as every role.

Only the learner may create a consumer: a consumer delivers to any subject its creator names, even that of another
stream. Operators and observers get replies only as JSON. A raw stored message or an empty reply could pass for an
acknowledgement on servers that allow ``$JS.ACK`` subjects as reply subjects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from asyncrl.bus.jetstream.credentials import answers, inbox
from asyncrl.bus.jetstream.kv import Lease, lease_prefix
from asyncrl.bus.jetstream.layout import WORKERS, Layout, token
from asyncrl.messages.topics import ALL, ALL_SERVICES, NAMED_ROLES, ROLES, Topic

OBJECTS: Final = "weight objects"
LEASES: Final = "leases"
ANY: Final = "*"
"""A worker or server of any name, and the NATS wildcard for any key."""
_ANY_KEY: Final = ("=2A", ANY)
"""How a layout encodes the key "*", and the NATS wildcard for any key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One thing that a role may do.

    of        topic, service or store that the right concerns; "" for a right of every role
    word      its name in ``table``
    requests  subjects of the learner's account that the role may publish to
    streamed  like ``requests``, where one request gets many replies
    follows   subjects of the learner's account that the role may subscribe to
    sends     subjects of the role's own account, which has no streams, that the role may publish to
    hears     subjects of the role's own account that the role may subscribe to
    """

    of: str = ""
    word: str = ""
    requests: tuple[str, ...] = ()
    streamed: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    hears: tuple[str, ...] = ()


def rights(role: str, *, run: str, worker: str = ANY) -> list[Right]:
    """Return the rights of a role other than the learner, which may do everything in its own account.

    worker  name of the rollout worker or server that has them; "*": they are those of all of them together
    """
    assert role in ROLES and role != "learner", role
    layout = Layout(run=run, max_prompts=1, max_log_bytes=1, ack_seconds=1.0, storage="file")
    name = worker if worker == ANY else token(worker)
    found = [_every_role(role, run, layout, name=name)]
    for topic in ALL:
        is_named = role in NAMED_ROLES
        found += _of_named(role, topic, layout, name) if is_named else _of_onlooker(role, topic, layout)
    if role == "rollout-worker":
        found += [_objects(layout), _leases(layout)]
    return found + _services(role, run, layout, name=name)


def table(run: str = "RUN") -> str:
    """Return a Markdown table of what each role may do to each topic, service and store."""
    words: dict[str, dict[str, list[str]]] = {}
    names = [topic.name for topic in ALL] + [OBJECTS, LEASES] + [f"{one.name} (service)" for one in ALL_SERVICES]
    for name in names:
        words[name] = {role: [] for role in ROLES[1:]}
    for role in ROLES[1:]:
        for right in rights(role, run=run):
            if right.of:
                words[right.of][role].append(right.word)
    others = " | ".join(f"`{role}`" for role in ROLES[1:])
    rows = [f"| | {others} |", "|---|" + "---|" * len(ROLES[1:])]
    for name, by_role in words.items():
        rows.append(f"| {name} | " + " | ".join(", ".join(by_role[role]) or "-" for role in ROLES[1:]) + " |")
    return "\n".join(rows) + "\n"


def _every_role(role: str, run: str, layout: Layout, *, name: str) -> Right:
    """Ask whether JetStream is up and what each stream holds under which keys, and receive the replies."""
    streams = sorted({layout.stream(topic) for topic in (*ALL, Lease.TOPIC)})
    return Right(
        requests=("$JS.API.INFO", *(f"$JS.API.STREAM.INFO.{stream}" for stream in streams)),
        hears=(_under(inbox(role, run=run), name),),
    )


def _under(prefix: str, name: str) -> str:
    """The subjects of one worker, or of a whole role."""
    return f"{prefix}.>" if name == ANY else f"{prefix}.{name}.>"


def _of_named(role: str, topic: Topic[Any], layout: Layout, name: str) -> list[Right]:
    publishes, reads = role in topic.publishers, role in topic.readers
    stream, prefix = layout.stream(topic), layout.prefix(topic)
    found = []
    if topic.kind == "work" and reads:
        found.append(_taking(topic.name, stream))
        reads = False
    if publishes:
        own: tuple[str, ...] = (f"{prefix}{name}.>",)
        if topic.kind == "state":  # a bare name in a log would not be compared with the message's
            own = (f"{prefix}{name}", *own)
        found.append(Right(of=topic.name, word="publish under its name", requests=own))
    if topic.kind == "state" and topic.seconds_to_live and reads and not topic.is_watched:
        found.append(Right(of=topic.name, word="read", requests=(f"$JS.API.DIRECT.GET.{stream}.{prefix}>",)))
    elif reads or (topic.kind == "state" and _shares_a_stream_with_what_is_read(role, topic, layout)):
        found.append(Right(of=topic.name, word="read", requests=(f"$JS.API.STREAM.MSG.GET.{stream}",)))
    if topic.kind == "state" and reads and (topic.is_watched or not publishes):
        followed = layout.republish_subject(topic, "*").replace(*_ANY_KEY)
        found.append(Right(of=topic.name, word="follow", follows=(followed,)))
    return found


def _shares_a_stream_with_what_is_read(role: str, topic: Topic[Any], layout: Layout) -> bool:
    """Whether a worker or a server may read the topic anyway. A request to a stream's leader names the message in its
    body, so permissions cannot tell the topics of a stream apart."""
    stream = layout.stream(topic)
    return any(layout.stream(other) == stream and role in other.readers for other in ALL)


def _taking(name: str, stream: str) -> Right:
    """Take prompts. Includes prompts that another worker holds, because the server does not check that."""
    return Right(
        of=name,
        word="take, acknowledge, remove",
        requests=(
            f"$JS.API.CONSUMER.INFO.{stream}.{WORKERS}",
            f"$JS.ACK.{stream}.{WORKERS}.>",
            f"$JS.API.STREAM.MSG.DELETE.{stream}",
        ),
        streamed=(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{WORKERS}",),
    )


def _of_onlooker(role: str, topic: Topic[Any], layout: Layout) -> list[Right]:
    """Rights of an operator or observer: read every log and state, and publish what the topic allows."""
    found = []
    if role in topic.publishers:
        found.append(Right(of=topic.name, word="publish", requests=(f"{layout.prefix(topic)}*",)))
    if topic.kind != "work":
        found.append(Right(of=topic.name, word="read", requests=(f"$JS.API.STREAM.MSG.GET.{layout.stream(topic)}",)))
    if topic.kind == "state":
        followed = layout.republish_subject(topic, "*").replace("=2A", ">")
        found.append(Right(of=topic.name, word="follow", follows=(followed,)))
    return found


def _objects(layout: Layout) -> Right:
    """Read a chunk by its sequence, read an object's description, and read both from the leader."""
    stream = layout.objects_stream
    return Right(
        of=OBJECTS,
        word="read",
        requests=(f"$JS.API.DIRECT.GET.{stream}.$O.{layout.objects_bucket}.M.*", f"$JS.API.STREAM.MSG.GET.{stream}"),
        streamed=(f"$JS.API.DIRECT.GET.{stream}",),  # a request may ask for several messages
    )


def _leases(layout: Layout) -> Right:
    """Hold the workers' leases. The learner's leases have another subject."""
    freed = layout.freed("*", role="rollout-worker").replace(*_ANY_KEY)
    return Right(
        of=LEASES,
        word="hold, release",
        requests=(
            f"{lease_prefix(layout, role='rollout-worker')}*",
            f"$JS.API.STREAM.MSG.GET.{layout.stream(Lease.TOPIC)}",
        ),
        sends=(freed,),
        hears=(freed,),
    )


def _services(role: str, run: str, layout: Layout, *, name: str) -> list[Right]:
    """Rights to services. A service that the role both asks and serves stays in its own account; others are the
    learner's."""
    found = []
    for service in ALL_SERVICES:
        subject = layout.service(service) + (f".{name}" if service.is_keyed else "")
        among = (_under(answers(role, run=run), name),)
        of = f"{service.name} (service)"
        if role in service.asked_by and role in service.served_by:
            found.append(Right(of=of, word="ask, serve", sends=(subject, *among), hears=(subject, *among)))
        elif role in service.asked_by:
            found.append(Right(of=of, word="ask", requests=(subject,), hears=among))
    return found
