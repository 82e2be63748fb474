"""`asyncrl rollout-worker`: a rollout worker's process, from the check of its settings to its exit code."""

from __future__ import annotations

import argparse
import gc
import os
import socket

from asyncrl import logs
from asyncrl.actors.base import HeartbeatSender
from asyncrl.cli import arguments, joining
from asyncrl.cli.actor_process import EXIT_SECONDS, in_event_loop, supervised
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.validation import name_problem
from asyncrl.os_process import end_with_parent, exit_within
from asyncrl.run import same_version, signing_keys, single_instance, worker_keys
from asyncrl.run.check import check_worker
from asyncrl.run.registry import connect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser, nargs="?")
    parser.add_argument(
        "--name", default="", help="a name no other worker of the run has (default: host and process id)"
    )
    parser.add_argument(
        "--join", default="", metavar="nats://HOST:PORT", help="the run's bus, to join without a run file; needs --run"
    )
    parser.add_argument("--run", default="", metavar="NAME", help="with --join: the run's name; its settings are there")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="with --join: a package or module whose code the run's settings may name here, or a server that they may "
        "ask (http://HOST:PORT); repeatable",
    )


def run(options: argparse.Namespace) -> int:
    end_with_parent()
    run_config = arguments.with_bus_address(_settings(options))
    name = options.name or worker_name()
    if problem := name_problem(name):
        raise ConfigError(f"rollout-worker --name: {problem}")
    logs.log_to(run_config.run_directory / "logs" / f"{name}.log")
    token = arguments.bus_token(run_config)
    return run_worker(run_config, name=name, token=token, has_joined=bool(options.join))


def _settings(options: argparse.Namespace) -> RunConfig:
    """The run file, or the settings that the run's learner left on its bus."""
    if options.run_file is not None and not (options.join or options.run):
        if options.allow:
            raise ConfigError("--allow: a run file of this machine may name any code; it is for --join")
        return arguments.load(options)
    if options.run_file is not None or not (options.join and options.run):
        raise ConfigError("rollout-worker: name a run file, or a bus and a run: --join nats://HOST:PORT --run NAME")
    return joining.joined(
        options.join, options.run, options.overrides, token=arguments.bus_token(), allow=options.allow
    )


def run_worker(run_config: RunConfig, *, name: str, token: str, has_joined: bool = False) -> int:
    """Sample until the worker is drained or the run is finished. Raises NameTaken while another has its name.

    ``has_joined``: without a run file, by the bus
    """
    check_worker(run_config)
    return in_event_loop(_sample(run_config, name=name, token=token, has_joined=has_joined))


async def _sample(run_config: RunConfig, *, name: str, token: str, has_joined: bool) -> int:
    from asyncrl.run.build import build_worker  # imports torch: not before a mistake has been told

    own = worker_keys.own_key()
    signatures = signing_keys.signatures(run_config, role="rollout-worker", own=own, has_joined=has_joined)
    bus = await connect(run_config, token=token, role="rollout-worker", signatures=signatures)
    try:
        async with single_instance.worker(bus, name, run=run_config.run.name):
            await same_version.await_learner(bus, run=run_config.run.name)
            worker, follower = await build_worker(run_config, bus=bus, name=name)
            gc.freeze()  # a collection over everything imported would stop every answer for a tenth of a second
            await supervised(worker, follower, HeartbeatSender(worker))
        exit_within(EXIT_SECONDS, 0)
        return 0
    finally:
        await bus.close()


def worker_name() -> str:
    """Unique among the machines and processes of a run, and valid in a subject of the bus."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"
