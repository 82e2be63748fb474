"""`asyncrl run`: a whole run from one file: its bus, its learner and its rollout workers, over a launcher.

One process = one command = one failure domain. What runs here holds no state that a run needs: kill it, and the same
command with --resume goes on. Whatever it started ends with it, so that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl import app, needs
from asyncrl.actors.watcher import Watcher
from asyncrl.app import BUS_FILE, connect
from asyncrl.bus.server import EmbeddedServer
from asyncrl.check import gpus_per_worker, placement
from asyncrl.children import Budget, Child
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.fleet import Fleet
from asyncrl.launchers.port import Launcher, ProcessSpec
from asyncrl.placement import Placement, numbers
from asyncrl.policies.faults import LEARNER, WORKER
from asyncrl.topics import PROGRESS


def run(run_config: RunConfig, *, run_file: Path, overrides: Sequence[str], resume: bool, token: str) -> int:
    """Run to the end; the exit code is the run's."""
    directory = run_config.run_directory
    if not resume and (directory / "checkpoints").exists():
        raise ConfigError(
            f"{directory} already holds a run; go on with --resume, or start another with --set run.name=NAME"
        )
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot make {directory}: {error.strerror}") from None
    common = [str(run_file), *(word for item in overrides for word in ("--set", item))]
    launcher = app.launcher(run_config)
    host = launcher.connect()
    if run_config.bus.url:
        children = _make_children(run_config, launcher, common, resume=resume, environment=_bus_access(token=token))
        return asyncio.run(_run(run_config, launcher, children, resume=resume, token=token, server=None))
    server = EmbeddedServer(
        directory / "nats", host=host, port=run_config.bus.port, max_message_bytes=run_config.bus.max_message_bytes
    )
    server.start()  # before the event loop: the server ends with the thread that started it
    address = directory / BUS_FILE
    try:
        _write_private(address, json.dumps({"url": server.url, "token": server.token, "pid": os.getpid()}))
        where = server.url.removeprefix("nats://")
        print(f"nats-server on {where}   run {run_config.run.name}   logs in {directory}/logs", flush=True)
        environment = _bus_access(url=server.url, token=server.token)
        children = _make_children(run_config, launcher, common, resume=resume, environment=environment)
        return asyncio.run(_run(run_config, launcher, children, resume=resume, token=token, server=server))
    finally:
        address.unlink(missing_ok=True)
        server.stop()


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _bus_access(*, token: str, url: str = "") -> dict[str, str]:
    """What processes need to know of the bus that is not in the run file."""
    known = {"ASYNCRL_BUS_URL": url, "ASYNCRL_BUS_TOKEN": token}
    return {name: value for name, value in known.items() if value}


def _make_children(
    run_config: RunConfig, launcher: Launcher, common: list[str], *, resume: bool, environment: dict[str, str]
) -> list[Child]:
    """The learner, then the workers."""
    gpus = (
        Placement(learner=(), workers=((),) * run_config.rollout.workers) if launcher.places else placement(run_config)
    )
    _say(gpus)
    restarts = run_config.run.restarts
    learner = Child(
        spec=ProcessSpec(
            name=LEARNER,
            role=LEARNER,
            arguments=("learner", *common),
            num_gpus=run_config.learner.ranks if run_config.learner.device != "cpu" else 0,
            gpus=gpus.learner,
            environment=environment,
            paths=needs.paths(run_config),
            shared=needs.learner_folders(run_config),
        ),
        budget=Budget(restarts),
        restart_arguments=("--resume",),
        resumed=resume,
    )
    workers = [
        Child(
            spec=ProcessSpec(
                name=name,
                role=WORKER,
                arguments=("rollout-worker", *common, "--name", name),
                num_gpus=gpus_per_worker(run_config),
                gpus=its,
                environment=environment,
                paths=needs.paths(run_config),
                shared=needs.worker_folders(run_config),
            ),
            budget=Budget(restarts),
        )
        for name, its in gpus.processes.items()
        if name != LEARNER
    ]
    return [learner, *workers]


def _say(gpus: Placement) -> None:
    for name, its in gpus.processes.items():
        if its:
            print(f"{name:10s}GPU {numbers(its)}", flush=True)


async def _run(
    run_config: RunConfig,
    launcher: Launcher,
    children: list[Child],
    *,
    resume: bool,
    token: str,
    server: EmbeddedServer | None,
) -> int:
    launcher.check_room([child.spec for child in children])
    if resume:
        await _reopen(run_config, token=token)
    fleet = Fleet(run_config.run, launcher=launcher, children=children, server=server)
    watcher = Watcher(
        lambda: connect(run_config, token=token),
        launched=fleet.launched,
        server=lambda: server.pid if server is not None else 0,
    )
    return await fleet.run(watcher)


async def _reopen(run_config: RunConfig, *, token: str) -> None:
    """Take back "finished" before workers read it: the run goes on."""
    bus = await connect(run_config, token=token)
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is not None and progress.finished:
            await bus.put(PROGRESS, replace(progress, finished=False))
    finally:
        await bus.close()
