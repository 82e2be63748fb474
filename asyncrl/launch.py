"""`asyncrl run`: every process of a run on this machine, started, watched, restarted and ended.

One process = one command = one failure domain. The launcher holds no state that a run needs: kill it, and the same
command with --resume goes on. Children end with it (processes.py), so that nothing is left behind.

A learner that dies is started again with --resume, a rollout worker as it was; each has a budget, and a process that
cannot come back ends the run with its exit code. Exit codes 2 (configuration) and 3 (a full disk, nothing but buried
groups) are never tried again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl import processes
from asyncrl.app import BUS_FILE, connect
from asyncrl.bus.server import EmbeddedServer
from asyncrl.check import placement
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, HopelessError
from asyncrl.placement import Gpus, numbers, visible_devices
from asyncrl.topics import PROGRESS

log = logging.getLogger("asyncrl.launch")

RESTARTS = 3
"""Times one process is started again before the run gives up."""
BACK_OFF_SECONDS = 1.0
NEVER_AGAIN = (ConfigError.exit_code, HopelessError.exit_code)
"""Exit codes of a process that would end the same way again."""
FINISH_SECONDS = 10.0
"""How long workers get to notice that the run is finished."""
DRAIN_SECONDS = 120.0
"""How long processes get to drain after Ctrl-C before they are killed."""

INTERRUPTED = 130


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
    children = _make_children(run_config, common, resume=resume)
    if run_config.bus.url:
        return asyncio.run(_run(run_config, children, resume=resume, token=token, server=None))
    server = EmbeddedServer(
        directory / "nats", port=run_config.bus.port, max_message_bytes=run_config.bus.max_message_bytes
    )
    server.start()  # before the event loop: the server ends with the thread that started it
    address = directory / BUS_FILE
    try:
        _write_private(address, json.dumps({"url": server.url, "token": server.token, "pid": os.getpid()}))
        where = server.url.removeprefix("nats://")
        print(f"nats-server on {where}   run {run_config.run.name}   logs in {directory}/logs", flush=True)
        return asyncio.run(_run(run_config, children, resume=resume, token=token, server=server))
    finally:
        address.unlink(missing_ok=True)
        server.stop()


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _make_children(run_config: RunConfig, common: list[str], *, resume: bool) -> list[_Child]:
    """The learner and the workers, each with its GPUs of this machine; says which, when there are any."""
    gpus = placement(run_config).processes
    for name, its in gpus.items():
        if its:
            print(f"{name:10s}GPU {numbers(its)}", flush=True)
    learner = _Child(
        name="learner",
        gpus=gpus.pop("learner"),
        arguments=["learner", *common],
        restart_arguments=["--resume"],
        resumed=resume,
    )
    workers = [
        _Child(name=name, gpus=its, arguments=["rollout-worker", *common, "--name", name]) for name, its in gpus.items()
    ]
    return [learner, *workers]


async def _run(
    run_config: RunConfig, children: list[_Child], *, resume: bool, token: str, server: EmbeddedServer | None
) -> int:
    if resume:
        await _reopen(run_config, token=token)
    return await _Launcher(children, server).run()


async def _reopen(run_config: RunConfig, *, token: str) -> None:
    """Take back "finished" before workers read it: the run goes on."""
    bus = await connect(run_config, token=token)
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is not None and progress.finished:
            await bus.put(PROGRESS, replace(progress, finished=False))
    finally:
        await bus.close()


@dataclass(slots=True, kw_only=True)
class _Child:
    """One process and how often it was started again."""

    name: str
    gpus: Gpus
    arguments: list[str]
    restart_arguments: list[str] = field(default_factory=list)
    resumed: bool = False
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0

    async def start(self) -> None:
        extra = self.restart_arguments if self.resumed or self.restarts else []
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncrl",
            *self.arguments,
            *extra,
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {processes.PARENT: str(os.getpid())} | self._visible_devices(),
            start_new_session=True,  # Ctrl-C comes to the launcher alone, which drains in the right order
        )

    def _visible_devices(self) -> dict[str, str]:
        """Its GPUs and no others, however often it is started; without GPUs it sees what we see."""
        variable = "CUDA_VISIBLE_DEVICES"
        return {variable: visible_devices(self.gpus, inherited=os.environ.get(variable))} if self.gpus else {}

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class _Launcher:
    """Watches the children of one run until it is over."""

    def __init__(self, children: Sequence[_Child], server: EmbeddedServer | None) -> None:
        self._server = server
        self._server_restarts = 0
        self._children = children
        self._learner, *self._workers = children
        self._over = asyncio.Event()  # the learner is done, we were interrupted, or somebody cannot come back
        self._interrupts = 0
        self._failure = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        self._watch_server()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(child), name=child.name) for child in self._children]
                await self._over.wait()
                if not self._failure and not self._interrupts:  # workers read for themselves that the run is finished
                    await asyncio.wait(tasks, timeout=FINISH_SECONDS)
                for child in self._children:
                    child.signal(signal.SIGTERM)
                # Only an interrupted run has work worth waiting for: a finished or failed one has none.
                await asyncio.wait(tasks, timeout=DRAIN_SECONDS if self._interrupts else FINISH_SECONDS)
                for child in self._children:
                    child.signal(signal.SIGKILL)
        finally:
            for child in self._children:
                child.signal(signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._failure or (INTERRUPTED if self._interrupts else 0)

    async def _keep(self, child: _Child) -> None:
        """Start the child, and again when it dies, until it ends well, its budget is used up, or we are ending."""
        while not self._over.is_set():
            started = time.monotonic()
            await child.start()
            assert child.process is not None
            code = await child.process.wait()
            if code == 0 and child is self._learner:
                self._over.set()
            elif child is self._learner and self._interrupts == 1:
                print(f"asyncrl run: learner ended with {_reason(code)} while draining", file=sys.stderr)
                self._failure = code if code > 0 else 1
            if code == 0 or self._over.is_set():
                return
            if code in NEVER_AGAIN or child.restarts >= RESTARTS:
                print(f"asyncrl run: {child.name} ended with {_reason(code)}; ending the run", file=sys.stderr)
                self._failure = code if code > 0 else 1
                self._over.set()
                return
            child.restarts += 1
            print(
                f"asyncrl run: {child.name} ended with {_reason(code)} after {time.monotonic() - started:.0f} s; "
                f"restart {child.restarts} of {RESTARTS}",
                file=sys.stderr,
            )
            await asyncio.sleep(BACK_OFF_SECONDS * 2 ** (child.restarts - 1))

    def _watch_server(self) -> None:
        """Have the loop tell us when our nats-server ends."""
        if self._server is not None and self._server.pid:
            watched = os.pidfd_open(self._server.pid)
            asyncio.get_running_loop().add_reader(watched, self._server_ended, watched)

    def _server_ended(self, watched: int) -> None:
        """Start the server again on its port and store: everybody waits for it, and nothing is lost."""
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
        assert self._server is not None
        self._server_restarts += 1
        if self._server_restarts > RESTARTS:
            print("asyncrl run: nats-server does not stay up; ending the run", file=sys.stderr)
            self._failure = 1
            self._over.set()
            return
        print(f"asyncrl run: nats-server ended; restart {self._server_restarts} of {RESTARTS}", file=sys.stderr)
        self._server.start()
        self._watch_server()

    def _interrupt(self) -> None:
        """Ctrl-C: the first drains, the second ends everything now."""
        self._interrupts += 1
        if self._interrupts == 1:
            print("asyncrl run: draining; once more to stop at once", file=sys.stderr)
            self._over.set()
        else:
            for child in self._children:
                child.signal(signal.SIGKILL)


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
