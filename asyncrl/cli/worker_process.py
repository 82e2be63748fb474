"""A rollout worker process: its identity and its connection to the bus."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from asyncrl import logs
from asyncrl.adapters.registry import connect
from asyncrl.bus.port import Bus
from asyncrl.cli.actor_process import EXIT_SECONDS
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import single_instance
from asyncrl.launch.keys import signing_keys, worker_keys
from asyncrl.launch.keys.worker_keys import Identity
from asyncrl.messages.validation import name_problem
from asyncrl.os_process import exit_within

log = logging.getLogger("asyncrl.cli.worker_process")


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        default="",
        help="prefix of the worker's name; 16 digits of its key follow (default: host and process id)",
    )


def default_label() -> str:
    """Return a name that is unique among the machines and processes of a run, and valid in a subject of the bus."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"


def identity(options: argparse.Namespace, run_config: RunConfig, *, label: str) -> Identity:
    """Return the worker's identity for the whole run, and start to log to LABEL.log. Raises ConfigError."""
    found = worker_keys.identity(label, os.environ)
    if problem := name_problem(found.name):
        raise ConfigError(f"{options.verb} --name: {problem}")
    logs.log_to(run_config.run_directory / "logs" / f"{label}.log")
    if found.has_own_key:
        log.info("joins run %s as %s", run_config.run.name, found.name)
    return found


@contextlib.asynccontextmanager
async def bus_of_worker(run_config: RunConfig, own: Identity, *, token: str) -> AsyncIterator[Bus]:
    """Connect to the bus, and wait while the run's learner has another message schema.

    After the context, the process ends within EXIT_SECONDS.

    Raises ConfigError while another worker has its name.
    """
    signatures = signing_keys.signatures(run_config, role="rollout-worker", own=own.key, life=own.life)
    bus, run = await connect(run_config, token=token, role="rollout-worker", signatures=signatures), run_config.run.name
    alone = contextlib.nullcontext() if own.has_own_key else single_instance.worker(bus, own.name, run=run)
    try:
        async with alone:
            yield bus
        exit_within(EXIT_SECONDS, 0)
    finally:
        await bus.close()
