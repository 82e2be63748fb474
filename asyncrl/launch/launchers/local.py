"""Launches processes on this machine as our children. CUDA_VISIBLE_DEVICES gives each child its assigned GPUs.

A child ends when we end, however that happens (os_process.py). It has its own session, so Ctrl-C reaches only us and we
can drain in the right order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl import os_process
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import LaunchError
from asyncrl.launch.launchers import placement
from asyncrl.launch.launchers.adapter import LauncherAdapter
from asyncrl.launch.port import ProcessSpec

LOOPBACK = "127.0.0.1"


class LocalProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.node = socket.gethostname()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    def signal(self, number: int) -> None:
        if self.is_running:
            self._process.send_signal(number)


class LocalLauncher(LauncherAdapter):
    def __init__(self, *, run_name: str, log_directory: Path, options: None = None) -> None:
        self._running: list[LocalProcess] = []

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        placement.check_memory(
            ranks=run.learner.ranks,
            workers=run.num_workers + len(run.started_servers),
            evaluation_workers=run.num_evaluation_workers,
            machine_bytes=machine,
        )

    def connect(self) -> str:
        return LOOPBACK

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        """Nothing to check: the GPUs are already assigned (placement.py)."""

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "asyncrl",
                *spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                env=os_process.environment_of_child(spec.environment)
                | {os_process.PARENT: str(os.getpid())}
                | _visible(spec),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{spec.name}: cannot start {sys.executable}: {error.strerror}") from None
        self._running = [one for one in self._running if one.is_running] + [LocalProcess(process)]
        return self._running[-1]

    async def release(self, name: str) -> None:
        """Do nothing: this launcher reserves nothing, and its caller takes the GPUs back."""

    async def close(self) -> None:
        for process in self._running:
            process.signal(signal.SIGKILL)
        for process in self._running:
            await process.wait()


def _visible(spec: ProcessSpec) -> dict[str, str]:
    """Restrict a process to its GPUs, at every restart. A process without GPUs sees what we see."""
    variable = "CUDA_VISIBLE_DEVICES"
    return {variable: placement.visible_devices(spec.gpus, inherited=os.environ.get(variable))} if spec.gpus else {}
