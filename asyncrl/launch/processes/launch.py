"""Starts a whole run from one run file and keeps it up: its bus, its learner and its rollout workers.

One process = one command = one failure domain. This process holds nothing that a run needs: after it is killed, the
same command with --resume continues the run. Everything that it started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl import config
from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.actors.learner import checkpoint
from asyncrl.actors.learner.failed_batches import forget_deaths
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.adapters import registry
from asyncrl.adapters.bus_file import BUS_FILE, launcher_pid, write_address
from asyncrl.adapters.registry import connect
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.bus.adapter import BusServer
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import resume_checks, single_instance, single_learner
from asyncrl.launch.launchers.adapter import launcher_class
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.launch.processes.fleet import FleetScaler
from asyncrl.launch.processes.process_manager import Outcome, ProcessManager
from asyncrl.launch.processes.process_specs import ProcessSpecs
from asyncrl.launch.processes.swap import LearnerSwapper, NewLearner
from asyncrl.logs import print_line
from asyncrl.messages.control import FleetSize
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.topics import FLEET, PROGRESS
from asyncrl.os_process import PYTHON_PATH
from asyncrl.policies.fleet_size import FleetSizer


async def launch(
    run_config: RunConfig,
    *,
    run_file: Path,
    overrides: Sequence[str],
    resume: bool,
    token: str,
    import_path: Sequence[str] = (),
    handles_signals: bool = False,
) -> Outcome:
    """Run to the end. Cancelling drains the run, as Ctrl-C does.

    run_file         read again by every process, with ``overrides``; ``run_config`` is the result
    token            token of the bus at bus.url
    import_path      folders from which every process imports, before its default ones
    handles_signals  SIGINT, SIGTERM and SIGHUP drain the run, a second signal kills it; for a process of this run alone

    Raises ConfigError for a run that cannot be started here, or is already up.
    """
    directory = run_config.run_directory
    has_run = (directory / HISTORY_FILE).exists() or checkpoint.list_complete(directory / "checkpoints")
    if not resume and has_run:  # an empty checkpoints folder may be a mounted disk
        raise ConfigError(
            f"{directory} already holds a run; continue it with --resume (in Python resume=True), or "
            "start another with another run.name"
        )
    if not registry.bus_class(run_config).is_shared:
        # Imports torch, which otherwise only the child processes do.
        from asyncrl.launch.processes.one_process import run_in_one_process

        forget_deaths(directory)
        return await run_in_one_process(run_config, resume=resume, owns_process=handles_signals)
    if resume:
        if not run_config.bus.url:
            _require_run(directory)
        RecordedRun(directory).checkpoint()  # raises if it cannot be read; the learner would wait for it
        resume_checks.check_settings(run_config)
    launcher = launcher_class(run_config).build(run_config)
    host = launcher.connect()
    common = [str(run_file), *(word for item in overrides for word in ("--set", item))]
    async with contextlib.AsyncExitStack() as stack:
        server = None if run_config.bus.url else stack.enter_context(_own_server(run_config, host=host))
        if server is None:  # the run's own server serves no other run
            await stack.enter_async_context(_claim_run(run_config, resume=resume, token=token))
            _make_folders(directory)  # only after the server at bus.url has answered
        forget_deaths(directory)
        environment = {"ASYNCRL_BUS_TOKEN": token} if token else {}
        if server is not None:
            environment = {"ASYNCRL_BUS_URL": server.url, "ASYNCRL_BUS_TOKEN": server.token}
        if import_path:
            environment[PYTHON_PATH] = os.pathsep.join(import_path)
        specs = ProcessSpecs(run_config, launcher=launcher, common=common, environment=environment, server=server)
        size = await _reset_finished(run_config, token=token) if resume else None
        children = specs.initial(size=size, resume=resume)
        launcher.check_room([child.spec for child in children])
        manager = ProcessManager(
            run_config.run, launcher=launcher, children=children, new_worker=specs.new_worker, server=server
        )
        if handles_signals:
            stack.enter_context(_handle_signals(manager.interrupt))
        numbers = itertools.count(1)

        def new_learner(more: Sequence[str], taken: frozenset[int], shadow: str) -> Sequence[ChildProcess]:
            changed = config.load(run_file, [*overrides, *more])
            name = f"{LEARNER}-swap{next(numbers)}"
            return specs.new_learner(changed, more, name=name, taken=taken, shadow=shadow)

        return await _run_processes(manager, run_config, new_learner=new_learner, token=token)


async def _run_processes(
    manager: ProcessManager, run_config: RunConfig, *, new_learner: NewLearner, token: str
) -> Outcome:
    def bus() -> Awaitable[Bus]:
        return connect(run_config, token=token)

    monitor = HealthMonitor(bus, own_processes=manager.own_processes)
    scaler = FleetScaler(bus, manager.fleet, rule=_fleet_rule(run_config))
    swapper = LearnerSwapper(run_config.run_directory, manager.fleet, new_learner=new_learner)
    running = asyncio.ensure_future(manager.run(monitor, scaler, swapper))  # awaited on every exit
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        manager.interrupt()
        await running  # a second cancellation kills the remaining processes
        raise


def _fleet_rule(run_config: RunConfig) -> FleetSizer | None:
    """None if the number of workers comes only from the run file or `asyncrl scale`."""
    rollout = run_config.rollout
    if rollout.most_workers <= rollout.workers:
        return None
    return FleetSizer(least=rollout.workers, most=rollout.most_workers, warmup=2 * (run_config.max_staleness + 1))


# -- the bus -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_server(run_config: RunConfig, *, host: str) -> Iterator[BusServer]:
    """Start the server of this run's bus, with its address in the run's folder.

    Raises ConfigError if the run is already up.
    """
    directory = run_config.run_directory
    _make_folders(directory)
    server = registry.bus_class(run_config).server(run_config, directory=directory, host=host)
    if server is None:
        raise ConfigError(f'bus.url: bus.kind = "{run_config.bus.kind}" needs the address of a server that runs')
    try:
        server.start()  # in this thread: the server ends with the thread that starts it
    except ConfigError:  # its store is in use, or the port that the run file gives
        if pid := launcher_pid(directory):
            raise ConfigError(
                f"{directory}: this run is up (`asyncrl run`, process {pid}); `asyncrl doctor` says how it is, Ctrl-C "
                "there ends it"
            ) from None
        raise
    address = directory / BUS_FILE
    try:
        write_address(directory, url=server.url, token=server.token, worker_token=server.worker_token("*"))
        where = server.url.partition("://")[2]
        print_line(f"{server.name} on {where}   run {run_config.run.name}   logs in {directory}/logs")
        yield server
    finally:
        address.unlink(missing_ok=True)
        server.stop()


@contextlib.asynccontextmanager
async def _claim_run(run_config: RunConfig, *, resume: bool, token: str) -> AsyncIterator[None]:
    """In this context, no other process can start this run on the bus. Raises ConfigError if one already has.

    A second learner would be refused anyway, but only after its workers had mixed with those of the first one.
    """
    bus = await connect(run_config, token=token)
    try:
        async with single_instance.launcher(bus, run=run_config.run.name):
            await single_learner.on_bus(bus, run=run_config.run.name)
            if resume:
                await resume_checks.require_checkpoint(run_config, bus=bus)
                if not await bus.states(PROGRESS):
                    _require_run(run_config.run_directory)
            yield
    finally:
        await bus.close()


async def _reset_finished(run_config: RunConfig, *, token: str) -> FleetSize | None:
    """Reset the state "finished" before workers read it. Returns the size that `asyncrl scale` set last."""
    bus = await connect(run_config, token=token)
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is not None and progress.finished:
            await bus.put(PROGRESS, replace(progress, finished=False))
        return (await bus.states(FLEET)).get("")
    finally:
        await bus.close()


# -- folder and signals ------------------------------------------------------------------------------------------------


def _require_run(directory: Path) -> None:
    """Raise ConfigError if there is no run to continue. Otherwise a typo in its name would start a new one."""
    if not directory.is_dir():
        there = sorted(path.parent.name for path in directory.parent.glob(f"*/{HISTORY_FILE}"))
        known = f"; in {directory.parent} there are {', '.join(there[-8:])}" if there else ""
        raise ConfigError(f"{directory}: no run to continue{known}; leave out --resume to start one")


def _make_folders(directory: Path) -> None:
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot make {directory}: {error.strerror}") from None


@contextlib.contextmanager
def _handle_signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """Interrupt the run on SIGINT, SIGTERM, and SIGHUP (a connection that is lost), unless nohup ignores it.

    Only the main thread can handle signals; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
