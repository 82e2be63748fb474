"""`asyncrl run`: every process of a run on this machine, started, watched, restarted and ended.

One process = one command = one failure domain. The launcher holds no state that a run needs: kill it, and the same
command with --resume goes on. Children end with it (processes.py), so that nothing is left behind.

A learner that dies is started again with --resume, a rollout worker as it was; each has a budget, and a process that
cannot come back ends the run with its exit code. Exit codes 2 (configuration) and 3 (a full disk, nothing but buried
groups) are never tried again. A watcher (actors/watcher.py) says what stands still; what is ours and does not heal is
killed, which makes it a process that died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl import processes
from asyncrl.actors.supervisor import STUCK_EXIT_CODE
from asyncrl.actors.watcher import Lasting, Launched, Watcher
from asyncrl.app import BUS_FILE, connect
from asyncrl.bus.server import EmbeddedServer
from asyncrl.check import placement
from asyncrl.config import RunConfig
from asyncrl.errors import INTERRUPTED, AsyncRLError, ConfigError, HopelessError
from asyncrl.placement import Gpus, numbers, visible_devices
from asyncrl.policies.faults import LEARNER, WORKER, Finding
from asyncrl.topics import PROGRESS

log = logging.getLogger("asyncrl.launch")

BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 30.0
HEALTHY_SECONDS = 600.0
"""A process that lived so long has all its restarts again."""
NEVER_AGAIN = (ConfigError.exit_code, HopelessError.exit_code)
"""Exit codes of a process that would end the same way again."""
FINISH_SECONDS = 10.0
"""How long workers get to notice that the run is finished."""
DRAIN_SECONDS = 120.0
"""How long processes get to drain after Ctrl-C before they are killed."""


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
    restarts = run_config.run.restarts
    learner = _Child(
        name=LEARNER,
        budget=_Budget(restarts),
        gpus=gpus.pop("learner"),
        arguments=["learner", *common],
        restart_arguments=["--resume"],
        resumed=resume,
    )
    workers = [
        _Child(
            name=name,
            budget=_Budget(restarts),
            gpus=its,
            arguments=["rollout-worker", *common, "--name", name],
        )
        for name, its in gpus.items()
    ]
    return [learner, *workers]


async def _run(
    run_config: RunConfig, children: list[_Child], *, resume: bool, token: str, server: EmbeddedServer | None
) -> int:
    if resume:
        await _reopen(run_config, token=token)
    watcher = Watcher(
        lambda: connect(run_config, token=token),
        launched=lambda: [launched for child in children for launched in child.launched()],
        server=lambda: server.pid if server is not None else 0,
    )
    return await _Launcher(run_config, children, server, watcher).run()


async def _reopen(run_config: RunConfig, *, token: str) -> None:
    """Take back "finished" before workers read it: the run goes on."""
    bus = await connect(run_config, token=token)
    try:
        progress = (await bus.states(PROGRESS)).get("")
        if progress is not None and progress.finished:
            await bus.put(PROGRESS, replace(progress, finished=False))
    finally:
        await bus.close()


@dataclass(slots=True)
class _Budget:
    """How often a process may be started again, and how long to wait before."""

    restarts: int
    used: int = 0

    def pause(self, lived_seconds: float) -> float | None:
        """Seconds to wait for the next start, so that two starts are a back-off apart; None when there is none."""
        if lived_seconds >= HEALTHY_SECONDS:
            self.used = 0
        if self.used >= self.restarts:
            return None
        self.used += 1
        back_off = min(BACK_OFF_SECONDS * 2 ** (self.used - 1), LONGEST_BACK_OFF_SECONDS)
        return float(max(0.0, back_off - lived_seconds))

    def __str__(self) -> str:
        return f"restart {self.used} of {self.restarts}"


@dataclass(slots=True, kw_only=True)
class _Child:
    """One process and how often it was started again."""

    name: str
    budget: _Budget
    gpus: Gpus
    arguments: list[str]
    restart_arguments: list[str] = field(default_factory=list)
    resumed: bool = False
    process: asyncio.subprocess.Process | None = None
    since: float = 0.0
    """Monotonic time of the last start or end."""
    is_kept: bool = False
    fault: str = ""
    """What we killed it for."""

    def launched(self) -> list[Launched]:
        """What the watcher should know of it."""
        if not self.is_kept:
            return []
        pid = self.process.pid if self.process is not None and self.process.returncode is None else 0
        role = LEARNER if self.name == LEARNER else WORKER
        return [Launched(name=self.name, role=role, pid=pid, seconds=time.monotonic() - self.since)]

    async def start(self) -> None:
        extra = self.restart_arguments if self.resumed or self.budget.used else []
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

    def __init__(
        self, run_config: RunConfig, children: Sequence[_Child], server: EmbeddedServer | None, watcher: Watcher
    ) -> None:
        self._settings = run_config.run
        self._server = server
        self._server_budget = _Budget(run_config.run.restarts)
        self._watcher = watcher
        self._lasting = Lasting()
        self._children = children
        self._learner, *self._workers = children
        self._over = asyncio.Event()  # the learner is done, we were interrupted, or somebody cannot come back
        self._interrupts = 0
        self._failure = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._keep(child), name=child.name) for child in self._children]
                watching = [group.create_task(self._watcher.run(self._on_findings), name="watcher")]
                if self._server is not None:
                    watching.append(group.create_task(self._keep_server(self._server), name="nats-server"))
                await self._over.wait()
                watching[0].cancel()
                if not self._failure and not self._interrupts:  # workers read for themselves that the run is finished
                    await asyncio.wait(tasks, timeout=FINISH_SECONDS)
                for child in self._children:
                    child.signal(signal.SIGTERM)
                # Only an interrupted run has work worth waiting for: a finished or failed one has none.
                await asyncio.wait(tasks, timeout=DRAIN_SECONDS if self._interrupts else FINISH_SECONDS)
                for child in self._children:
                    child.signal(signal.SIGKILL)
                for task in watching:
                    task.cancel()
        finally:
            for child in self._children:
                child.signal(signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._failure or (INTERRUPTED if self._interrupts else 0)

    async def _keep(self, child: _Child) -> None:
        """Start the child, and again when it dies, until it ends well, its budget is used up, or we are ending."""
        child.is_kept = True
        try:
            while not self._over.is_set():
                child.since, child.fault = time.monotonic(), ""
                await child.start()
                assert child.process is not None
                code = await child.process.wait()
                lived, child.since = time.monotonic() - child.since, time.monotonic()
                if (pause := self._pause(child, code, lived_seconds=lived)) is None:
                    return
                await asyncio.sleep(pause)
        finally:
            child.is_kept = False

    def _pause(self, child: _Child, code: int, *, lived_seconds: float) -> float | None:
        """Seconds until the child is started again; None when it is not, and why that ends the run, if it does."""
        is_learner, was_over = child is self._learner, self._over.is_set()
        if is_learner and self._interrupts == 1 and code not in (0, INTERRUPTED):
            self._end(code, f"learner ended with {_reason(code)} while draining")
        elif is_learner and code == INTERRUPTED and not self._interrupts:
            self._end(code, "learner was drained by somebody else before the run was done; go on with --resume")
        elif is_learner and code == 0:
            self._over.set()
        if code == 0 or was_over or self._over.is_set():
            return None
        why = f"{child.name} ended with {_reason(code)}" + (f" ({child.fault})" if child.fault else "")
        pause = None if code in NEVER_AGAIN else child.budget.pause(lived_seconds)
        if pause is None:
            self._end(STUCK_EXIT_CODE if child.fault else code, f"{why}; ending the run")
        else:
            self._say(f"{why} after {lived_seconds:.0f} s; {child.budget}")
        return pause

    async def _keep_server(self, server: EmbeddedServer) -> None:
        """Start the server again on its port and store when it ends: everybody waits for it, and nothing is lost."""
        while True:
            started = time.monotonic()
            why = "nats-server ended"
            await _until_ended(server.pid)
            while (pause := self._server_budget.pause(time.monotonic() - started)) is not None:
                self._say(f"{why}; {self._server_budget}")
                await asyncio.sleep(pause)
                try:
                    server.start()  # here and not in a thread: it ends with the thread that started it
                    break
                except AsyncRLError as error:
                    why = str(error)
            else:
                self._end(1, f"nats-server does not stay up ({why}); ending the run")
                return

    # -- what stands still ---------------------------------------------------------------------------------------------

    def _on_findings(self, findings: Iterable[Finding]) -> None:
        """Say what begins and what is over; start again what is ours and does not heal."""
        begun, ended = self._lasting.update(findings)
        for finding in begun:
            self._say(f"{finding.text}\n  -> {finding.remedy}")
        for finding in ended:
            self._say(f"over after {finding.seconds:.0f} s: {finding.fault} of {finding.actor}")
        for finding in findings:
            if finding.cure and finding.is_hopeless(self._settings.stall_seconds) and not self._over.is_set():
                self._cure(finding)

    def _cure(self, finding: Finding) -> None:
        child = next((one for one in self._children if one.launched() and one.launched()[0].pid == finding.pid), None)
        if finding.fault in ("bus", "bus storage") and self._server is not None and self._server.pid:
            os.kill(self._server.pid, signal.SIGKILL)
        elif finding.cure == "restart" and finding.pid and child is not None and not child.fault:
            child.fault = finding.cause
            child.signal(signal.SIGKILL)
        elif finding.cure == "end" and self._workers:  # without own workers others may be on their way
            self._end(STUCK_EXIT_CODE, f"{finding.text}; ending the run")

    def _end(self, code: int, why: str) -> None:
        self._say(why)
        self._failure = code if code > 0 else 1
        self._over.set()

    def _say(self, text: str) -> None:
        print(f"asyncrl run: {text}", file=sys.stderr, flush=True)

    def _interrupt(self) -> None:
        """Ctrl-C: the first drains, the second ends everything now."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._say("draining; once more to stop at once")
            self._over.set()
        else:
            for child in self._children:
                child.signal(signal.SIGKILL)


async def _until_ended(pid: int) -> None:
    """Until the process with this id, a child of ours, is no more."""
    if not pid:
        return
    watched, ended = os.pidfd_open(pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
