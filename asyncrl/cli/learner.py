"""`asyncrl learner RUN.toml`: the learner process, from checking the run file to its exit code.

torchrun starts one process per rank, on any number of machines. Rank 0 is the learner; the other ranks serve it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
from pathlib import Path

from asyncrl import logs
from asyncrl.adapters.registry import backend_class, connect, serve_rank, set_learner_environment
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.cli import arguments
from asyncrl.cli.actor_process import EXIT_SECONDS, in_event_loop, supervise_process
from asyncrl.config import RunConfig
from asyncrl.launch.checks import resume_checks, single_learner
from asyncrl.launch.checks.run_file import check_learner
from asyncrl.launch.processes.swap import TAKE_OVER, ready_file
from asyncrl.logs import print_line
from asyncrl.os_process import end_with_parent, exit_within


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the run's last checkpoint")
    parser.add_argument(
        "--standby",
        metavar="NAME",
        default="",
        help="get ready, say so by swap/NAME.ready in the run's folder, and begin when SIGUSR1 comes (`asyncrl swap`)",
    )
    parser.add_argument(
        "--promote",
        metavar="SHADOW",
        type=Path,
        help="with --standby: begin with the state of this shadow learner (`asyncrl promote`)",
    )
    parser.add_argument(
        "--beside-engines", action="store_true", help="engines sample on the learner's GPUs: leave them their memory"
    )


def run(options: argparse.Namespace) -> int:
    if options.standby:
        signal.pthread_sigmask(signal.SIG_BLOCK, {TAKE_OVER})  # in all threads: it may come early
    run_config = arguments.load(options)
    end_with_parent()
    set_learner_environment(run_config)  # in every rank: each has a part of the model to send
    if rank := backend_class(run_config).rank_here(run_config):
        return _serve(run_config, rank=rank, standby=options.standby)
    run_config = arguments.with_bus_address(run_config)
    logs.log_to(run_config.run_directory / "logs" / "learner.log")
    return run_learner(
        run_config,
        resume=options.resume,
        token=arguments.bus_token(run_config),
        beside_engines=options.beside_engines,
        standby=options.standby,
        shadow=options.promote,
    )


def run_learner(
    run_config: RunConfig,
    *,
    resume: bool,
    token: str,
    beside_engines: bool = False,
    standby: str = "",
    shadow: Path | None = None,
) -> int:
    """Train to the end of the run. Raises ConfigError while another learner has this run.

    beside_engines  engines are on the learner's GPUs at the same time
    standby         name of this process if another learner has the run, which this one is to take over
    shadow          folder of a shadow learner whose state replaces the backend's part of the newest checkpoint then
    """
    check_learner(run_config)
    if resume:  # also after a death: the run file and the model may have changed since
        resume_checks.check_settings(run_config)
    if standby:
        if shadow is not None:  # it may have ended, or been promoted, since it was asked for
            _require_up(shadow)
        _wait_to_take_over(ready_file(run_config.run_directory, standby))
    with single_learner.in_folder(run_config.run_directory):
        if shadow is not None:
            _promote(run_config, shadow)
            ready_file(run_config.run_directory, standby).unlink(missing_ok=True)
        return in_event_loop(_learn(run_config, resume=resume, token=token, beside_engines=beside_engines))


def _wait_to_take_over(ready: Path) -> None:
    """Import what takes seconds, say that we are ready, and wait for TAKE_OVER."""
    importlib.import_module("asyncrl.launch.assembly.training")
    ready.parent.mkdir(exist_ok=True)
    ready.touch()
    signal.sigwait({TAKE_OVER})


def _require_up(shadow: Path) -> None:
    from asyncrl.audit.shadow import require_up  # imports torch

    require_up(shadow)


def _promote(run_config: RunConfig, shadow: Path) -> None:
    from asyncrl.audit.shadow import promote  # imports torch

    recorded = RecordedRun(run_config.run_directory)
    asyncio.run(promote(recorded, shadow, keep=run_config.checkpoint.keep, say=print_line))


def _serve(run_config: RunConfig, *, rank: int, standby: str) -> int:
    logs.log_to(run_config.run_directory / "logs" / f"learner-rank-{rank}.log")
    check_learner(run_config)
    if standby:
        _wait_to_take_over(ready_file(run_config.run_directory, standby))
    serve_rank(run_config)
    return 0


async def _learn(run_config: RunConfig, *, resume: bool, token: str, beside_engines: bool) -> int:
    from asyncrl.launch.assembly.training import train  # imports torch; errors in the run file are reported before

    bus = await connect(run_config, token=token)
    try:
        await single_learner.on_bus(bus, run=run_config.run.name)
        if resume:
            await resume_checks.require_checkpoint(run_config, bus=bus)
        code = await train(run_config, bus, resume=resume, beside_engines=beside_engines, run_actors=supervise_process)
        exit_within(EXIT_SECONDS, code)
        for number in (signal.SIGTERM, signal.SIGINT):  # a late signal would make a finished run look interrupted
            signal.signal(number, signal.SIG_IGN)
        return code
    finally:
        await bus.close()
