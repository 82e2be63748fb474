"""A run on a bus inside one process: the learner and the rollout workers are actors of one event loop.

Nothing restarts the process and nothing outlives it. Such a run cannot be resumed, joined, scaled or watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from asyncrl import logs
from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.actors.supervisor import supervise
from asyncrl.adapters import registry
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, ConfigError, exit_code_of
from asyncrl.launch.assembly.build_worker import build_worker
from asyncrl.launch.assembly.model_servers import model_server_actor
from asyncrl.launch.assembly.training import train
from asyncrl.launch.checks import single_learner
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.launch.processes.process_manager import Outcome

log = logging.getLogger("asyncrl.launch")


async def run_in_one_process(run: RunConfig, *, resume: bool, owns_process: bool) -> Outcome:
    """Train to the end in a folder that holds no run yet. Cancelling drains the run; cancelling again ends it.

    owns_process  the process is dedicated to this run, which keeps its logs and handles its signals

    Raises ConfigError for a run that cannot be started here.
    """
    if resume:
        raise ConfigError(
            f'--resume: bus.kind = "{run.bus.kind}" keeps nothing of a run that has ended; start another with '
            "--set run.name=NAME"
        )
    registry.set_learner_environment(run)
    with _log_to_folder(run, owns_process=owns_process):
        logs.print_line(f"one process   run {run.run.name}   logs in {run.run_directory}/logs")
        bus = await registry.own_bus(run)
        try:
            with single_learner.in_folder(run.run_directory):
                workers = [await _worker(run, bus, name=f"w{number}") for number in range(run.rollout.workers)]
                workers += [await _worker(run.of_pool(pool), bus, name=name) for name, pool in run.pool_workers.items()]
                evaluating = [
                    await _worker(run, bus, name=f"e{number}", is_dedicated=True)
                    for number in range(run.num_evaluation_workers)
                ]
                beside = [
                    *(model_server_actor(run, name, bus=bus) for name in run.started_servers),
                    *(actor for actors in (*workers, *evaluating) for actor in actors),
                ]
                code = await _train(run, bus, beside=beside, owns_process=owns_process)
            return Outcome(exit_code=code, reason="interrupted" if code else "done")
        except ConfigError:
            raise
        except AsyncRLError as error:
            log.error("%s", error)
            return Outcome(exit_code=exit_code_of(error), reason=str(error))
        finally:
            await bus.close()


async def _train(run: RunConfig, bus: Bus, *, beside: list[Actor], owns_process: bool) -> int:
    learners: list[Actor] = []

    async def run_actors(learner: Actor, *helpers: Actor) -> None:
        learners.append(learner)
        await supervise(learner, *helpers, owns_process=owns_process)

    training = asyncio.ensure_future(train(run, bus, beside=beside, run_actors=run_actors))
    try:
        return await asyncio.shield(training)
    except asyncio.CancelledError:
        for learner in learners:
            learner.drain()
        if not learners:  # its models are still loading, so there is nothing to save
            training.cancel()
        await training  # a cancellation here ends it immediately
        raise


@contextlib.contextmanager
def _log_to_folder(run: RunConfig, *, owns_process: bool) -> Iterator[None]:
    path = run.run_directory / "logs" / "run.log"
    if owns_process:
        logs.log_to(path)
        yield
    else:
        with logs.logging_to(path):
            yield


async def _worker(run: RunConfig, bus: Bus, *, name: str, is_dedicated: bool = False) -> tuple[Actor, ...]:
    worker, *others = await build_worker(run, bus=bus, name=name, is_dedicated=is_dedicated)
    return worker, *others, HeartbeatSender(worker, about=settings_checksum(run))
