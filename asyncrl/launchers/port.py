"""What `asyncrl run` asks of whoever starts processes. Adapters pass tests/test_launcher_contract.py.

A launcher starts, signals and ends; it decides nothing. How often a process is started again, what is killed because
it stands still, and when the run is over is decided by asyncrl/fleet.py, the same way over every launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run: ``python -m asyncrl ARGUMENTS``.

    name         unique in the run: learner, w0, w1, ...
    role         "learner" or "rollout-worker" (policies/faults.py)
    num_gpus     it takes so many of one machine, if any machine has some (device = "auto"); 0: it computes on the CPU
    gpus         which, numbered as the launcher's own machine sees them, where asyncrl deals them (``Launcher.places``
                 is False); empty otherwise
    environment  set for it on top of what it inherits; may hold secrets, so it goes on no command line and in no log
    paths        key of the run file -> what must be on its machine
    shared       key of the run file -> a folder that must be ours there, too, unless it is with the learner
    """

    name: str
    role: str
    arguments: tuple[str, ...]
    num_gpus: int = 0
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    paths: Mapping[str, Path] = field(default_factory=dict)
    shared: Mapping[str, Path] = field(default_factory=dict)

    def renamed(self, name: str) -> ProcessSpec:
        """A rollout worker's under another name: the last of its arguments."""
        return replace(self, name=name, arguments=(*self.arguments[:-1], name))


class LaunchedProcess(Protocol):
    """One life of a process."""

    @property
    def pid(self) -> int:
        """Its process id on ``node``, as its own heartbeat has it."""
        ...

    @property
    def node(self) -> str:
        """The host name of its machine, as ``socket.gethostname()`` gives it there."""
        ...

    async def ended(self) -> int:
        """Wait for its end; the exit code, or minus the number of the signal that killed it.

        A process whose machine is gone was killed by SIGKILL. It may be awaited again.
        """
        ...

    def signal(self, number: int) -> None:
        """Send a signal and do not wait; nothing happens when it has ended."""
        ...


class Launcher(Protocol):
    """Starts processes that end with it: nothing that it started outlives it, even when it is killed."""

    @property
    def places(self) -> bool:
        """Whether it finds machine and GPUs itself (by num_gpus), or is told which GPUs (spec.gpus)."""
        ...

    def connect(self) -> str:
        """Before the event loop runs and before all else: reach the machines. Our own address as they know it.

        Raises ConfigError when they cannot be reached, or have a run of this name already.
        """
        ...

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        """Raises NoRoom when these can never run at once. That others use the room now is no reason: start waits."""
        ...

    async def start(self, spec: ProcessSpec) -> LaunchedProcess:
        """Start it, on the GPUs that this name had before, if it had any and they are still there.

        Raises NoRoom when no GPUs are free for it, LaunchError when it could not be started and may be next time.
        """
        ...

    async def release(self, name: str) -> None:
        """This name has ended and is not started again: what was set aside for it is free."""
        ...

    async def close(self) -> None:
        """Leave nothing running and nothing set aside."""
        ...
