"""`asyncrl engine-node`: the process of another machine of a worker's engine (engine.options.machines)."""

from __future__ import annotations

import argparse
import logging
import os

from asyncrl import logs
from asyncrl.adapters import registry
from asyncrl.cli import arguments
from asyncrl.cli.actor_process import in_event_loop
from asyncrl.cli.rollout_worker import add_meeting, add_pool, meeting_of, of_pool
from asyncrl.config import RunConfig
from asyncrl.engines.port import Meeting, SpansMachines
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check_engine_node
from asyncrl.logs import print_line
from asyncrl.os_process import end_with_parent

log = logging.getLogger("asyncrl.cli.engine_node")

_REACH_SECONDS = 60.0
"""For a worker of the same run. It may be elsewhere after a restart, which the next start of this process is told."""
_FOREVER_SECONDS = 365 * 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument("--worker", required=True, help="name of the worker whose engine it is")
    add_meeting(parser)
    add_pool(parser)
    parser.add_argument("--name", default="", help="name of its log (default: WORKER-node and the process id)")


def run(options: argparse.Namespace) -> int:
    is_launched = end_with_parent()
    run_config = of_pool(arguments.load(options), options)
    if registry.engine_class(run_config).machines(run_config) == 1:
        raise ConfigError("engine-node: the run's engines are on one machine (engine.options.machines)")
    meeting = meeting_of(options, worker=options.worker)
    if meeting is None:
        raise ConfigError(
            f"engine-node --meet HOST:PORT: where does {options.worker} listen for its engine's machines?"
        )
    name = options.name or f"{options.worker}-node-{os.getpid()}"
    logs.log_to(run_config.run_directory / "logs" / f"{name}.log")
    check_engine_node(run_config)
    return in_event_loop(_serve(run_config, meeting, name=name, is_launched=is_launched))


async def _serve(run_config: RunConfig, meeting: Meeting, *, name: str, is_launched: bool) -> int:
    """Be a part of the worker's engine until it is closed in order, and return the exit code.

    If the engine ends otherwise, a launcher starts this process again; started by hand, it waits for the next engine.
    """
    while True:
        engine = registry.engine(run_config, name=name)
        assert isinstance(engine, SpansMachines)
        if not is_launched:
            print_line(f"{name} joins the engine of {meeting.worker} at {meeting.host}:{meeting.port}")
        ended = await engine.join(meeting, seconds=_REACH_SECONDS if is_launched else _FOREVER_SECONDS)
        if not ended:
            return 0
        log.error("the engine of %s has ended: %s", meeting.worker, ended)
        if is_launched:
            return 1
        print_line(f"the engine of {meeting.worker} has ended: {ended}; waiting for its next start")
