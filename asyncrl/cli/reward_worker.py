"""`asyncrl reward-worker`: a reward worker's process, from the check of its settings to its exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from asyncrl.run.checks.run_file import check_reward_worker
from asyncrl.run.keys import signing_keys, worker_keys
from asyncrl.run.keys.worker_keys import Identity
from asyncrl.run.registry import connect

log = logging.getLogger("asyncrl.cli.reward_worker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    joining.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    end_with_parent()
    run_config = arguments.with_bus_address(joining.settings(options))
    label = options.name or f"r-{joining.default_label()}"
    identity = worker_keys.identity(label, os.environ)
    if problem := name_problem(identity.name):
        raise ConfigError(f"reward-worker --name: {problem}")
    logs.log_to(run_config.run_directory / "logs" / f"{label}.log")
    if identity.has_own_key:
        log.info("joins run %s as %s", run_config.run.name, identity.name)
    check_reward_worker(run_config)
    token = arguments.bus_token(run_config)
    return in_event_loop(_grade(run_config, identity, token=token, has_joined=bool(options.join)))


async def _grade(run_config: RunConfig, identity: Identity, *, token: str, has_joined: bool) -> int:
    """Grade until the worker is drained or the run is finished. Raises NameTaken while another has its name.

    has_joined  without a run file, by the bus
    """
    from asyncrl.run.assembly.build_worker import build_reward_worker  # may import torch: after a mistake was told

    run, name = run_config.run.name, identity.name
    signatures = signing_keys.signatures(
        run_config, role="rollout-worker", own=identity.key, life=identity.life, has_joined=has_joined
    )
    bus = await connect(run_config, token=token, role="rollout-worker", signatures=signatures)
    alone = contextlib.nullcontext() if identity.has_own_key else single_instance.worker(bus, name, run=run)
    try:
        async with alone:
            await same_version.await_learner(bus, run=run)
            worker = build_reward_worker(run_config, bus=bus, name=name)
            about = await asyncio.to_thread(checksums, run_config)
            await supervised(worker, HeartbeatSender(worker, about=about))
        exit_within(EXIT_SECONDS, 0)
        return 0
    finally:
        await bus.close()
