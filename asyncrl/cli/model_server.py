"""`asyncrl model-server`: the process of a frozen model's server, [servers.NAME] of the run file."""

from __future__ import annotations

import argparse

from asyncrl import logs
from asyncrl.actors.base import HeartbeatSender
from asyncrl.adapters.registry import connect
from asyncrl.cli import arguments
from asyncrl.cli.actor_process import EXIT_SECONDS, in_event_loop, supervise_process
from asyncrl.config import RunConfig
from asyncrl.errors import INTERRUPTED, ConfigError
from asyncrl.launch.checks.run_file import check_server
from asyncrl.messages.roles import MODEL_SERVER
from asyncrl.os_process import end_with_parent, exit_within


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument("--name", required=True, help="which of [servers.NAME]")


def run(options: argparse.Namespace) -> int:
    end_with_parent()
    run_config, name = arguments.with_bus_address(arguments.load(options)), options.name
    if name not in run_config.started_servers:
        raise ConfigError(f"model-server --name {name}: the run file starts no server of this name")
    logs.log_to(run_config.run_directory / "logs" / f"{name}.log")
    check_server(run_config, name)
    return in_event_loop(_serve(run_config, name, token=arguments.bus_token(run_config)))


async def _serve(run_config: RunConfig, name: str, *, token: str) -> int:
    """Serve until the run is finished, or until drained, and return the exit code."""
    # imports torch
    from asyncrl.launch.assembly.metrics_endpoint import prometheus
    from asyncrl.launch.assembly.model_servers import model_server_actor

    bus = await connect(run_config, token=token, role=MODEL_SERVER, worker=name)
    try:
        actor = model_server_actor(run_config, name, bus=bus)
        await supervise_process(actor, HeartbeatSender(actor), *prometheus(run_config, bus, actor))
        exit_within(EXIT_SECONDS, 0)
        return INTERRUPTED if actor.draining.is_set() else 0
    finally:
        await bus.close()
