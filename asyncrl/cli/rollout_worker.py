"""`asyncrl rollout-worker`: a rollout worker's process, from the check of its settings to its exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os

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
    joining.add_arguments(parser)
    parser.add_argument(
        "--evaluate", action="store_true", help="only answer evaluations (evaluation.place = dedicated)"
    )


def run(options: argparse.Namespace) -> int:
    end_with_parent()
    run_config = arguments.with_bus_address(joining.settings(options))
    label = options.name or joining.default_label()
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
