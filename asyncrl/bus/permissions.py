"""Which role may do what on a nats-server. Pure; nats_config.py writes it down for one.

Every run is a NATS account of its own: its streams, subjects and inboxes do not exist for the users of another. In it

  learner         everything: it makes the streams
  rollout-worker  takes prompts; publishes trajectories, events, its heartbeat and its leases; reads what WORKER_READS
                  lists, and objects; asks the learner for weights, and other workers for their names
  operator        reads as an observer; says how large the fleet should be
  observer        reads everything that can be read without taking it away; writes nothing

A worker can still starve its own run (it may take prompts and ack them) and call itself by another worker's name: it
cannot make weights, progress or prompts, nor read or trim the trajectory log. Tests: tests/test_bus_permissions.py.
"""

from __future__ import annotations

from typing import Any, Final

from asyncrl.bus.access import Access
from asyncrl.bus.layout import WORKERS, Layout
from asyncrl.bus.lease import Lease
from asyncrl.topics import (
    ACTORS,
    ALL,
    EVENTS,
    FLEET,
    PROGRESS,
    PROMPTS,
    QUARANTINE,
    SEGMENTS,
    SETTINGS,
    TRAJECTORIES,
    TRANSFERS,
    WEIGHTS,
    Topic,
    worker_named,
)

WORKER_READS: Final[tuple[Topic[Any], ...]] = (WEIGHTS, PROGRESS, QUARANTINE, SETTINGS)
WORKER_WRITES: Final[tuple[Topic[Any], ...]] = (TRAJECTORIES, EVENTS, ACTORS)
WORKER_KEEPS: Final[tuple[Topic[Any], ...]] = (SEGMENTS,)
"""What workers leave for each other: written, read and removed."""
OPERATOR_WRITES: Final[tuple[Topic[Any], ...]] = (FLEET,)


def permissions(role: str, *, run: str) -> dict[str, Any] | None:
    """What NATS calls permissions, of a role in a run's account; None may do everything there."""
    if role == "learner":
        return None
    layout = Layout(run=run, max_prompts=1, max_log_bytes=1, ack_seconds=1.0, storage="file")
    streams = sorted({layout.stream(topic) for topic in (*ALL, Lease.TOPIC)})
    publish = ["$JS.API.INFO", *(f"$JS.API.STREAM.INFO.{stream}" for stream in streams)]
    subscribe = [f"{Access(role=role).inbox(run)}.>"]
    if role == "rollout-worker":
        publish += _of_worker(layout)
        subscribe += [layout.freed("*").replace("=2A", "*")]
        subscribe += [layout.told(topic, "*").replace("=2A", "*") for topic in WORKER_READS]
        subscribe += [layout.service(worker_named("*")).replace("=2A", "*")]
    else:
        subscribe += sorted({layout.told(topic, "*").replace("=2A", ">") for topic in ALL if topic.kind == "state"})
        publish += [subject for stream in streams if stream != layout.stream(PROMPTS) for subject in _reading(stream)]
        if role == "operator":
            publish += [f"{layout.prefix(topic)}*" for topic in OPERATOR_WRITES]
    answers = {"allow_responses": {"max": 1, "expires": "1m"}} if role == "rollout-worker" else {}
    return {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}} | answers


def _of_worker(layout: Layout) -> list[str]:
    prompts, leases = layout.stream(PROMPTS), layout.stream(Lease.TOPIC)
    return [
        f"$JS.API.CONSUMER.CREATE.{prompts}.{WORKERS}",
        f"$JS.API.CONSUMER.MSG.NEXT.{prompts}.{WORKERS}",
        f"$JS.ACK.{prompts}.{WORKERS}.>",
        f"$JS.API.STREAM.MSG.DELETE.{prompts}",
        f"$JS.API.DIRECT.GET.{layout.objects_stream}",  # a chunk, by its sequence
        f"$JS.API.DIRECT.GET.{layout.objects_stream}.$O.{layout.objects_bucket}.M.*",
        f"$JS.API.STREAM.MSG.GET.{layout.objects_stream}",  # both, of the leader
        *(subject for topic in WORKER_READS for subject in _following(layout.stream(topic), layout.prefix(topic))),
        *(f"{layout.prefix(topic)}*" for topic in WORKER_WRITES),
        *(subject for topic in WORKER_KEEPS for subject in _keeping(layout.stream(topic), layout.prefix(topic))),
        f"{layout.prefix(Lease.TOPIC)}*",
        f"$JS.API.STREAM.PURGE.{leases}",
        layout.freed("*").replace("=2A", "*"),
        layout.service(TRANSFERS),
        layout.service(worker_named("*")).replace("=2A", "*"),
    ]


def _reading(stream: str) -> list[str]:
    """Requests that read a stream, and its last messages."""
    return [
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.STREAM.MSG.GET.{stream}",
    ]


def _following(stream: str, prefix: str) -> list[str]:
    """Requests that read the states behind ``prefix``, and watch any of the stream's."""
    return [f"$JS.API.DIRECT.GET.{stream}.{prefix}*", f"$JS.API.STREAM.MSG.GET.{stream}"]


def _keeping(stream: str, prefix: str) -> list[str]:
    """Requests that write, read and remove states whose keys have parts."""
    return [f"{prefix}>", f"$JS.API.DIRECT.GET.{stream}.{prefix}>", f"$JS.API.STREAM.PURGE.{stream}"]
