"""`asyncrl run`: a whole run from one file: its bus, its learner and its rollout workers, over a launcher.

One process = one command = one failure domain. What runs here holds no state that a run needs: kill it, and the same
command with --resume goes on. Whatever it started ends with it, so that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl import app, elsewhere, needs, only_learner, only_one
from asyncrl.actors.sizer import Sizer
from asyncrl.actors.watcher import Watcher
from asyncrl.app import BUS_FILE, connect
from asyncrl.bus.server import EmbeddedServer
from asyncrl.children import Budget, Child
from asyncrl.commands.check import gpus_per_worker, num_gpus, placement
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.fleet import Fleet
from asyncrl.history import HISTORY_FILE
from asyncrl.launchers.port import Launcher, ProcessSpec
from asyncrl.placement import Gpus, Placement, free, numbers
from asyncrl.policies.faults import LEARNER, WORKER
from asyncrl.protocols import Bus
from asyncrl.recorded import launcher_pid
from asyncrl.topics import FLEET, PROGRESS


def run(run_config: RunConfig, *, run_file: Path, overrides: Sequence[str], resume: bool, token: str) -> int:
    """Run to the end; the exit code is the run's."""
    directory = run_config.run_directory
    if not resume and any((directory / name).exists() for name in (HISTORY_FILE, "checkpoints")):
        raise ConfigError(
            f"{directory} already holds a run; go on with --resume, or start another with --set run.name=NAME"
        )
    if resume and not run_config.bus.url:
        _require_run(directory)
    common = [str(run_file), *(word for item in overrides for word in ("--set", item))]
    launcher = app.launcher(run_config)
    host = launcher.connect()
    start = functools.partial(_run, run_config, launcher, common, resume=resume, token=token)
    if run_config.bus.url:
        return asyncio.run(start(server=None))
    _make(directory)
    server = EmbeddedServer(
        directory / "nats", host=host, port=run_config.bus.port, max_message_bytes=run_config.bus.max_message_bytes
    )
    try:
        server.start()  # before the event loop: the server ends with the thread that started it
    except ConfigError:  # its store, or its port if the run file gives one
        if pid := launcher_pid(directory):
            raise ConfigError(
                f"{directory}: this run is up (`asyncrl run`, process {pid}); `asyncrl doctor` says how it is, Ctrl-C "
                "there ends it"
            ) from None
        raise
    address = directory / BUS_FILE
    try:
        _write_private(address, json.dumps({"url": server.url, "token": server.token, "pid": os.getpid()}))
        where = server.url.removeprefix("nats://")
        print(f"nats-server on {where}   run {run_config.run.name}   logs in {directory}/logs", flush=True)
        return asyncio.run(start(server=server))
    finally:
        address.unlink(missing_ok=True)
        server.stop()


def _require_run(directory: Path) -> None:
    """Raise ConfigError when there is no run to go on with: a slip in its name would begin another one."""
    if not directory.is_dir():
        there = sorted(path.parent.name for path in directory.parent.glob(f"*/{HISTORY_FILE}"))
        known = f"; in {directory.parent} there are {', '.join(there[-8:])}" if there else ""
        raise ConfigError(f"{directory}: no run to go on with{known}; leave out --resume to start one")


def _make(directory: Path) -> None:
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot make {directory}: {error.strerror}") from None


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


async def _run(
    run_config: RunConfig,
    launcher: Launcher,
    common: list[str],
    *,
    resume: bool,
    token: str,
    server: EmbeddedServer | None,
) -> int:
    async with contextlib.AsyncExitStack() as stack:
        if run_config.bus.url:  # a server of our own has our run alone
            await stack.enter_async_context(_alone(run_config, resume=resume, token=token))
            _make(run_config.run_directory)  # not before somebody answers there
        return await _supervised(run_config, launcher, common, resume=resume, token=token, server=server)


@contextlib.asynccontextmanager
async def _alone(run_config: RunConfig, *, resume: bool, token: str) -> AsyncIterator[None]:
    """A second learner would be refused anyway, but not before its workers had mixed with the first one's."""
    bus = await connect(run_config, token=token)
    try:
        async with only_one.launcher(bus, run=run_config.run.name):
            await only_learner.on_bus(bus, run=run_config.run.name)
            if resume:
                await elsewhere.refuse(run_config, bus=bus)
                if not await bus.states(PROGRESS):
                    _require_run(run_config.run_directory)
            yield
    finally:
        await bus.close()


async def _supervised(
    run_config: RunConfig,
    launcher: Launcher,
    common: list[str],
    *,
    resume: bool,
    token: str,
    server: EmbeddedServer | None,
) -> int:
    environment = _bus_access(url=server.url, token=server.token) if server is not None else _bus_access(token=token)
    staff = Staff(run_config, launcher=launcher, common=common, environment=environment)
    workers = await _reopen(run_config, token=token) if resume else None
    children = staff.first(workers=workers, resume=resume)
    launcher.check_room([child.spec for child in children])
    fleet = Fleet(
        run_config.run,
        launcher=launcher,
        children=children,
        hire=staff.hire,
        server=server,
    )

    def bus() -> Awaitable[Bus]:
        return connect(run_config, token=token)

    watcher = Watcher(bus, launched=fleet.launched, server=lambda: server.pid if server is not None else 0)
    return await fleet.run(watcher, Sizer(bus, fleet))


async def _reopen(run_config: RunConfig, *, token: str) -> int | None:
    """Take back "finished" before workers read it: the run goes on. The size that its fleet was asked to have last."""
    bus = await connect(run_config, token=token)
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is not None and progress.finished:
            await bus.put(PROGRESS, replace(progress, finished=False))
        size = (await bus.states(FLEET)).get("")
        return None if size is None else size.rollout_workers
    finally:
        await bus.close()


def _bus_access(*, token: str, url: str = "") -> dict[str, str]:
    """What processes need to know of the bus that is not in the run file."""
    known = {"ASYNCRL_BUS_URL": url, "ASYNCRL_BUS_TOKEN": token}
    return {name: value for name, value in known.items() if value}


class Staff:
    """What the processes of a run are started with."""

    def __init__(
        self, run_config: RunConfig, *, launcher: Launcher, common: Sequence[str], environment: dict[str, str]
    ) -> None:
        """common: the run file and overrides of each"""
        self._run = run_config
        self._places = launcher.places
        self._common = common
        self._environment = environment

    def first(self, *, workers: int | None, resume: bool) -> list[Child]:
        """The learner, then ``workers``, or as many as the run file says. Says who gets which GPUs, if there are any.

        Raises ConfigError when there are too few.
        """
        run = self._run
        if workers is not None and workers != run.rollout.workers:
            print(
                f"rollout workers: {workers}, as `asyncrl scale` had it; rollout.workers is {run.rollout.workers}",
                flush=True,
            )
            run = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, workers=workers))
        gpus = Placement(learner=(), workers=((),) * run.rollout.workers) if self._places else placement(run)
        for name, its in gpus.processes.items():
            if its:
                print(f"{name:10s}GPU {numbers(its)}", flush=True)
        learner = Child(
            spec=ProcessSpec(
                name=LEARNER,
                role=LEARNER,
                arguments=("learner", *self._common),
                num_gpus=run.learner.ranks if run.learner.device != "cpu" else 0,
                gpus=gpus.learner,
                environment=self._environment,
                paths=needs.learner_paths(run),
                shared=needs.learner_folders(run),
            ),
            budget=Budget(run.run.restarts),
            restart_arguments=("--resume",),
            resumed=resume,
        )
        return [learner, *(self._worker(name, its) for name, its in gpus.processes.items() if name != LEARNER)]

    def hire(self, name: str, taken: frozenset[int]) -> Child:
        """One more rollout worker, on none of the GPUs ``taken``. Raises NoRoom."""
        needed = gpus_per_worker(self._run)
        given = self._run.rollout.gpus
        return self._worker(name, () if self._places else free(num_gpus(), taken=taken, needed=needed, given=given))

    def _worker(self, name: str, gpus: Gpus) -> Child:
        spec = ProcessSpec(
            name=name,
            role=WORKER,
            arguments=("rollout-worker", *self._common, "--name", name),
            num_gpus=gpus_per_worker(self._run),
            gpus=gpus,
            environment=self._environment,
            paths=needs.worker_paths(self._run),
            shared=needs.worker_folders(self._run),
        )
        return Child(spec=spec, budget=Budget(self._run.run.restarts))
