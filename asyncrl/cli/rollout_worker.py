"""`asyncrl rollout-worker`: the process of a rollout worker, from checking its settings to its exit code."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Callable

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.cli import arguments, worker_process
from asyncrl.cli.actor_process import in_event_loop, supervise_process
from asyncrl.config import RunConfig
from asyncrl.errors import INTERRUPTED, ConfigError
from asyncrl.launch.checks.run_file import check_worker
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.logs import print_line
from asyncrl.os_process import end_with_parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    worker_process.add_name(parser)
    parser.add_argument(
        "--evaluate", action="store_true", help="only answer evaluations (evaluation.place = dedicated)"
    )
    parser.add_argument("--pool", default="", metavar="NAME", help="the engine is that of rollout.pools.NAME")
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


def run(options: argparse.Namespace) -> int:
    is_launched = end_with_parent()
    run_config = arguments.with_bus_address(arguments.load(options))
    name = worker_process.name_of(options, run_config)
    if options.pool and options.pool not in run_config.rollout.pools:
        raise ConfigError(f"rollout-worker --pool {options.pool}: the run file has no [rollout.pools.{options.pool}]")
    run_config = run_config.of_pool(options.pool)
    check_worker(run_config)
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
            say=_ignore if is_launched else print_line,
        )
    )
    return code if is_launched else 0  # a worker that was started by hand may leave at any time


def _ignore(line: str) -> None:
    """The run that started a worker speaks for it."""


async def _sample(
    run_config: RunConfig,
    name: str,
    *,
    token: str,
    is_dedicated: bool,
    beside_learner: int,
    takes_turns: bool,
    say: Callable[[str], object],
) -> int:
    """Sample until the worker is drained or the run is finished, and return the exit code: INTERRUPTED if drained.

    Raises ConfigError while another worker has its name.

    is_dedicated    only evaluate
    beside_learner, takes_turns  see build_worker
    say             called with a line when the worker joins and leaves
    """
    # imports torch; errors in the settings are reported before
    from asyncrl.launch.assembly.build_learner import prometheus
    from asyncrl.launch.assembly.build_worker import build_worker

    async with worker_process.bus_of_worker(run_config, name, token=token) as bus:
        say(f"{name} joins run {run_config.run.name}   log in {run_config.run_directory}/logs/{name}.log")
        worker, *followers = await build_worker(
            run_config,
            bus=bus,
            name=name,
            is_dedicated=is_dedicated,
            beside_learner=beside_learner,
            takes_turns=takes_turns,
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
