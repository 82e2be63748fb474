"""A rollout worker process: its name and its connection to the bus."""

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
from asyncrl.messages.validation import name_problem
from asyncrl.os_process import exit_within

log = logging.getLogger("asyncrl.cli.worker_process")


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        default="",
        help="name of the worker, unique in the run (default: host and process id)",
    )


def _default_name() -> str:
    """Return a name that is unique among the machines and processes of a run, and valid in a subject of the bus."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"


def name_of(options: argparse.Namespace, run_config: RunConfig) -> str:
    """Return the worker's name, and start to log to NAME.log. Raises ConfigError."""
    name = options.name or _default_name()
    if problem := name_problem(name):
        raise ConfigError(f"{options.verb} --name: {problem}")
    logs.log_to(run_config.run_directory / "logs" / f"{name}.log")
    log.info("joins run %s as %s", run_config.run.name, name)
    return name


@contextlib.asynccontextmanager
async def bus_of_worker(run_config: RunConfig, name: str, *, token: str) -> AsyncIterator[Bus]:
    """Connect to the bus. After the context, the process ends within EXIT_SECONDS.

    Raises ConfigError while another worker has its name.
    """
    bus = await connect(run_config, token=token, role="rollout-worker", worker=name)
    try:
        async with single_instance.worker(bus, name, run=run_config.run.name):
            yield bus
        exit_within(EXIT_SECONDS, 0)
    finally:
        await bus.close()
