"""`asyncrl rollout-worker`: a rollout worker's process, from the check of its settings to its exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
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
from asyncrl.run.checks import same_version, single_instance
from asyncrl.run.checks.own_code import checksums
from asyncrl.run.checks.run_file import check_worker
from asyncrl.run.keys import signing_keys, worker_keys
from asyncrl.run.keys.worker_keys import Identity
from asyncrl.run.registry import connect

log = logging.getLogger("asyncrl.cli.rollout_worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser, nargs="?")
    parser.add_argument(
        "--name",
        default="",
        help="prefix of the worker's name; 16 digits of its key follow (default: host and process id)",
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="only answer evaluations (evaluation.place = dedicated)"
    )
    parser.add_argument(
        "--join", default="", metavar="nats://HOST:PORT", help="the run's bus, to join without a run file; needs --run"
    )
    parser.add_argument(
        "--run", default="", metavar="NAME", help="with --join: the run's name; its settings come from the bus"
    )
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
    label = options.name or default_label()
    identity = worker_keys.identity(label, os.environ)
    if problem := name_problem(identity.name):
        raise ConfigError(f"rollout-worker --name: {problem}")
    logs.log_to(run_config.run_directory / "logs" / f"{label}.log")
    if identity.has_own_key:
        log.info("joins run %s as %s", run_config.run.name, identity.name)
    check_worker(run_config)
    if options.evaluate and not run_config.num_evaluation_workers:
        raise ConfigError(
            'rollout-worker --evaluate: the run file has no evaluation.place = "dedicated" with data sets'
        )
    token = arguments.bus_token(run_config)
    return in_event_loop(
        _sample(run_config, identity, token=token, has_joined=bool(options.join), is_dedicated=bool(options.evaluate))
    )


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


async def _sample(
    run_config: RunConfig, identity: Identity, *, token: str, has_joined: bool, is_dedicated: bool
) -> int:
    """Sample until the worker is drained or the run is finished. Raises NameTaken while another has its name.

    has_joined    without a run file, by the bus
    is_dedicated  evaluate and do nothing else
    """
    from asyncrl.run.assembly.build_learner import prometheus  # imports torch: not before a mistake has been told
    from asyncrl.run.assembly.build_worker import build_worker

    run, name = run_config.run.name, identity.name
    signatures = signing_keys.signatures(
        run_config, role="rollout-worker", own=identity.key, life=identity.life, has_joined=has_joined
    )
    bus = await connect(run_config, token=token, role="rollout-worker", signatures=signatures)
    alone = contextlib.nullcontext() if identity.has_own_key else single_instance.worker(bus, name, run=run)
    try:
        async with alone:
            await same_version.await_learner(bus, run=run)
            worker, follower = await build_worker(run_config, bus=bus, name=name, is_dedicated=is_dedicated)
            gc.freeze()  # a collection over everything imported would stop every answer for a tenth of a second
            endpoint = prometheus(run_config, bus, worker)
            about = await asyncio.to_thread(checksums, run_config)
            await supervised(worker, follower, HeartbeatSender(worker, about=about), *endpoint)
        exit_within(EXIT_SECONDS, 0)
        return 0
    finally:
        await bus.close()


def default_label() -> str:
    """Unique among the machines and processes of a run, and valid in a subject of the bus."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"
