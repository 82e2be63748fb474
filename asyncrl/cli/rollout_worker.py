"""`asyncrl rollout-worker`: the process of a rollout worker, from checking its settings to its exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable

from asyncrl import logs
from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.cli import arguments
from asyncrl.cli.actor_process import EXIT_SECONDS, in_event_loop, supervise_process
from asyncrl.config import RunConfig
from asyncrl.config.addresses import host_and_port
from asyncrl.engines.port import Meeting
from asyncrl.errors import INTERRUPTED, ConfigError
from asyncrl.launch.checks import single_instance
from asyncrl.launch.checks.run_file import check_worker
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.logs import print_line
from asyncrl.messages.validation import name_problem
from asyncrl.os_process import end_with_parent, exit_within

log = logging.getLogger("asyncrl.cli.rollout_worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument(
        "--name", default="", help="name of the worker, unique in the run (default: host and process id)"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="only answer evaluations (evaluation.place = dedicated)"
    )
    add_pool(parser)
    add_meeting(parser)
    parser.add_argument(
        "--own-gpus", action="store_true", help="with run.colocated: this worker's GPUs are not the learner's"
    )
    parser.add_argument(
        "--beside-learner",
        type=int,
        default=0,
        metavar="N",
        help="the learner trains on this worker's GPU, beside N engines: take only the memory that it leaves",
    )


def add_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool", default="", metavar="NAME", help="the engine is that of rollout.pools.NAME")


def add_meeting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--meet",
        default="",
        metavar="HOST:PORT",
        help="where the machines of an engine meet (engine.options.machines): a free port of the worker's machine "
        "(default: MASTER_ADDR:MASTER_PORT of the environment)",
    )


def of_pool(run_config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Return the run as the pool of --pool sees it. Raises ConfigError."""
    if options.pool and options.pool not in run_config.rollout.pools:
        raise ConfigError(f"{options.verb} --pool {options.pool}: the run file has no [rollout.pools.{options.pool}]")
    return run_config.of_pool(options.pool)


def meeting_of(options: argparse.Namespace, *, worker: str) -> Meeting | None:
    """Return where the machines of the worker's engine meet, if anything says so. Raises ConfigError."""
    given = options.meet or ":".join(filter(None, map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))))
    if not given:
        return None
    try:
        host, port = host_and_port(given)
    except ConfigError as error:
        raise ConfigError(f"{options.verb} --meet: {error}") from None
    return Meeting(host=host, port=port, worker=worker)


def run(options: argparse.Namespace) -> int:
    is_launched = end_with_parent()
    run_config = arguments.with_bus_address(arguments.load(options))
    name = _name_of(options, run_config)
    run_config = of_pool(run_config, options)
    check_worker(run_config)
    meeting = meeting_of(options, worker=name) if registry.engine_class(run_config).machines(run_config) > 1 else None
    if options.evaluate and not run_config.num_evaluation_workers:
        raise ConfigError(
            'rollout-worker --evaluate: the run file has no evaluation.place = "dedicated" with data sets'
        )
    token = arguments.bus_token(run_config)
    code = in_event_loop(
        _sample(
            run_config,
            name,
            token=token,
            is_dedicated=bool(options.evaluate),
            beside_learner=options.beside_learner,
            takes_turns=not options.own_gpus,
            meeting=meeting,
            say=(lambda line: None) if is_launched else print_line,  # the run that started it speaks for it
        )
    )
    return code if is_launched else 0  # a worker that was started by hand may leave at any time


def _name_of(options: argparse.Namespace, run_config: RunConfig) -> str:
    """Return the worker's name, and start to log to NAME.log. Raises ConfigError."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    name = options.name or f"{host}-{os.getpid()}"  # valid in a subject of the bus
    if problem := name_problem(name):
        raise ConfigError(f"{options.verb} --name: {problem}")
    logs.log_to(run_config.run_directory / "logs" / f"{name}.log")
    log.info("joins run %s as %s", run_config.run.name, name)
    return name


@contextlib.asynccontextmanager
async def _bus_of_worker(run_config: RunConfig, name: str, *, token: str) -> AsyncIterator[Bus]:
    """Connect to the bus. After the context, the process ends within EXIT_SECONDS.

    Raises ConfigError while another worker has its name.
    """
    bus = await registry.connect(run_config, token=token, role="rollout-worker", worker=name)
    try:
        async with single_instance.worker(bus, name, run=run_config.run.name):
            yield bus
        exit_within(EXIT_SECONDS, 0)
    finally:
        await bus.close()


async def _sample(
    run_config: RunConfig,
    name: str,
    *,
    token: str,
    is_dedicated: bool,
    beside_learner: int,
    takes_turns: bool,
    meeting: Meeting | None,
    say: Callable[[str], object],
) -> int:
    """Sample until the worker is drained or the run is finished, and return the exit code: INTERRUPTED if drained.

    Raises ConfigError while another worker has its name.

    is_dedicated    only evaluate
    beside_learner, takes_turns, meeting  see build_worker
    say             called with a line when the worker joins and leaves
    """
    # imports torch; errors in the settings are reported before
    from asyncrl.launch.assembly.build_worker import build_worker
    from asyncrl.launch.assembly.metrics_endpoint import prometheus

    async with _bus_of_worker(run_config, name, token=token) as bus:
        say(f"{name} joins run {run_config.run.name}   log in {run_config.run_directory}/logs/{name}.log")
        worker, *followers = await build_worker(
            run_config,
            bus=bus,
            name=name,
            is_dedicated=is_dedicated,
            beside_learner=beside_learner,
            takes_turns=takes_turns,
            meeting=meeting,
        )
        gc.freeze()  # a collection over all imported objects would stop every answer for a tenth of a second
        about = settings_checksum(run_config)
        draining = asyncio.ensure_future(_say_draining(worker, name=name, say=say))
        await supervise_process(
            worker, *followers, HeartbeatSender(worker, about=about), *prometheus(run_config, bus, worker)
        )
        draining.cancel()
        say(f"{name} has left: {'the run is finished' if worker.is_finished else 'others have its work'}")
        was_drained = worker.draining.is_set() and not worker.is_finished
    return INTERRUPTED if was_drained else 0


async def _say_draining(worker: Actor, *, name: str, say: Callable[[str], object]) -> None:
    """waits for: a signal to end"""
    await worker.draining.wait()
    say(f"{name} finishes its groups; once more to hand them over and leave")
