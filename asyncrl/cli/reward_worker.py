"""`asyncrl reward-worker`: the process of a reward worker, from checking its settings to its exit code."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.actors.base import HeartbeatSender
from asyncrl.cli import arguments, joining, worker_process
from asyncrl.cli.actor_process import in_event_loop, supervised
from asyncrl.config import RunConfig
from asyncrl.launch.checks.own_code import checksums
from asyncrl.launch.checks.run_file import check_reward_worker
from asyncrl.launch.keys.worker_keys import Identity
from asyncrl.os_process import end_with_parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    joining.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    end_with_parent()
    run_config = arguments.with_bus_address(joining.settings(options))
    label = options.name or f"r-{joining.default_label()}"
    identity = worker_process.identity(options, run_config, label=label)
    check_reward_worker(run_config)
    token = arguments.bus_token(run_config)
    return in_event_loop(_grade(run_config, identity, token=token, has_joined=bool(options.join)))


async def _grade(run_config: RunConfig, identity: Identity, *, token: str, has_joined: bool) -> int:
    """Grade until the worker is drained or the run is finished. Raises NameTaken while another worker has its name.

    has_joined  without a run file, through the bus
    """
    # may import torch; errors in the settings are reported before
    from asyncrl.launch.assembly.build_worker import build_reward_worker

    async with worker_process.bus_of_worker(run_config, identity, token=token, has_joined=has_joined) as bus:
        worker = build_reward_worker(run_config, bus=bus, name=identity.name)
        about = await asyncio.to_thread(checksums, run_config)
        await supervised(worker, HeartbeatSender(worker, about=about))
    return 0
