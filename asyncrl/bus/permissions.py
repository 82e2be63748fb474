"""Which role may do what on a nats-server, and a configuration that says so. Pure but for ``main``.

Every run is a NATS account of its own: its streams, subjects and inboxes do not exist for the users of another. In it

  learner         everything: it makes the streams
  rollout-worker  takes prompts; publishes trajectories, events, its heartbeat and its leases; reads what WORKER_READS
                  lists; asks the learner for weights
  observer        reads everything that can be read without taking it away; writes nothing

A worker can still starve its own run (it may take prompts and ack them) and call itself by another worker's name: it
cannot make weights, progress or prompts, nor read or trim the trajectory log. Tests: tests/test_bus_permissions.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.bus.access import ROLES, Access
from asyncrl.bus.layout import HEADER_BYTES, WORKERS, Layout
from asyncrl.bus.lease import Lease
from asyncrl.topics import (
    ACTORS,
    ALL,
    EVENTS,
    PROGRESS,
    PROMPTS,
    QUARANTINE,
    SEGMENTS,
    TRAJECTORIES,
    TRANSFERS,
    WEIGHTS,
    Topic,
)

WORKER_READS: Final[tuple[Topic[Any], ...]] = (WEIGHTS, PROGRESS, QUARANTINE)
WORKER_WRITES: Final[tuple[Topic[Any], ...]] = (TRAJECTORIES, EVENTS, ACTORS)
WORKER_KEEPS: Final[tuple[Topic[Any], ...]] = (SEGMENTS,)
"""What workers leave for each other: written, read and removed."""

CONFIG_FILE: Final = "nats-server.conf"


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
    else:
        subscribe += sorted({layout.told(topic, "*").replace("=2A", ">") for topic in ALL if topic.kind == "state"})
        publish += [subject for stream in streams if stream != layout.stream(PROMPTS) for subject in _reading(stream)]
    return {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}}


def _of_worker(layout: Layout) -> list[str]:
    prompts, leases = layout.stream(PROMPTS), layout.stream(Lease.TOPIC)
    return [
        f"$JS.API.CONSUMER.CREATE.{prompts}.{WORKERS}",
        f"$JS.API.CONSUMER.MSG.NEXT.{prompts}.{WORKERS}",
        f"$JS.ACK.{prompts}.{WORKERS}.>",
        f"$JS.API.STREAM.MSG.DELETE.{prompts}",
        *(subject for topic in WORKER_READS for subject in _following(layout.stream(topic), layout.prefix(topic))),
        *(f"{layout.prefix(topic)}*" for topic in WORKER_WRITES),
        *(subject for topic in WORKER_KEEPS for subject in _keeping(layout.stream(topic), layout.prefix(topic))),
        f"{layout.prefix(Lease.TOPIC)}*",
        f"$JS.API.STREAM.PURGE.{leases}",
        layout.freed("*").replace("=2A", "*"),
        layout.service(TRANSFERS),
    ]


def _reading(stream: str) -> list[str]:
    """Requests that read a stream."""
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


def server_config(
    passwords: dict[str, dict[str, str]],
    *,
    listen: str,
    store: Path,
    max_message_bytes: int,
    tls: dict[str, Any] | None = None,
) -> str:
    """A nats-server's configuration (which may be JSON).  ``passwords``: run -> role -> password"""
    accounts = {
        run: {
            "jetstream": "enabled",
            "users": [
                {"user": user_name(run, role), "password": password}
                | ({"permissions": allowed} if (allowed := permissions(role, run=run)) else {})
                for role, password in roles.items()
            ],
        }
        for run, roles in passwords.items()
    }
    config: dict[str, Any] = {
        "listen": listen,
        "max_payload": max_message_bytes + HEADER_BYTES,
        "max_pending": max(256 * 2**20, 4 * max_message_bytes),
        "jetstream": {"store_dir": str(store)},
        "accounts": accounts,
    }
    if tls:
        config["tls"] = tls
    return json.dumps(config, indent=2) + "\n"


def user_name(run: str, role: str) -> str:
    return f"{run}-{role}"


# -- bin/nats-config ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bin/nats-config",
        description="Write a nats-server configuration in which every run is an account of its own and every role has "
        "a password and no more rights than it needs. Passwords that are there are kept: repeat it with more runs, "
        "then `nats-server --signal reload`.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run.name of each run the server may carry")
    parser.add_argument("--directory", type=Path, required=True, help="gets nats-server.conf and RUN/ROLE, all 0600")
    parser.add_argument("--listen", default="0.0.0.0:4222", metavar="HOST:PORT", help="(default: %(default)s)")
    parser.add_argument("--max-message-bytes", type=int, default=8 * 2**20, help="(default: %(default)s)")
    parser.add_argument("--tls-certificate", type=Path, help="PEM of the server; with it only TLS is spoken")
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--tls-client-ca", type=Path, help="PEM: clients must show a certificate this one signed")
    options = parser.parse_args(arguments)
    for run in options.runs:
        if not re.fullmatch("[A-Za-z0-9_-]+", run):
            parser.error(f"{run!r} is no run.name: letters, digits, - and _")
    directory: Path = options.directory.absolute()
    tls: dict[str, Any] | None = None
    if options.tls_certificate:
        if not options.tls_key:
            parser.error("--tls-certificate needs --tls-key")
        tls = {"cert_file": str(options.tls_certificate.absolute()), "key_file": str(options.tls_key.absolute())}
        if options.tls_client_ca:
            tls |= {"ca_file": str(options.tls_client_ca.absolute()), "verify": True}
    passwords = {run: {role: _password(directory / run / role, run, role) for role in ROLES} for run in options.runs}
    text = server_config(
        passwords,
        listen=options.listen,
        store=directory / "jetstream",
        max_message_bytes=options.max_message_bytes,
        tls=tls,
    )
    _write_private(directory / CONFIG_FILE, text)
    print(f"nats-server --config {directory / CONFIG_FILE}")
    for run in options.runs:
        print(f'run {run}: bus.credentials = "{directory / run}/{{role}}"; a worker\'s node needs only rollout-worker')


def _password(path: Path, run: str, role: str) -> str:
    """The one in the file, or a new one written there."""
    if path.exists():
        return path.read_text().strip().partition(":")[2]
    password = secrets.token_urlsafe(32)
    _write_private(path, f"{user_name(run, role)}:{password}\n")
    return password


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
