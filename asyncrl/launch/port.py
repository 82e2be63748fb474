"""The port through which `asyncrl run` starts processes. Adapters pass tests/contracts/test_launcher.py.

A launcher starts, signals and stops processes. asyncrl/launch/processes/process_manager.py decides how often to
restart a process, which hung processes to kill, and when the run is over, in the same way for every launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run: ``python -m asyncrl ARGUMENTS``.

    name         unique in the run: learner, w0, w1, ...
    role         "learner", "learner-rank", "rollout-worker", ... (messages/roles.py)
    num_gpus     GPUs that it takes on one machine, if any machine has some (device = "auto"); 0: it runs on the CPU
    gpus         indices on the launcher's machine, if asyncrl assigns GPUs (``Launcher.places`` is False); else empty
    environment  added to the inherited environment, with its PYTHONPATH in front; may hold secrets, so never put it on
                 a command line or in a log

    For launchers that choose machines (``Launcher.places``); values are names of other processes of the run:
    beside       the process must be on the same machine as the named one
    apart        the process must be on another machine than each of the named ones
    meets        MASTER_ADDR in the environment is set to the address of the named process's machine
    """

    name: str
    role: str
    arguments: tuple[str, ...]
    num_gpus: int = 0
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    beside: str = ""
    apart: tuple[str, ...] = ()
    meets: str = ""


class LaunchedProcess(Protocol):
    """A running or exited process."""

    @property
    def pid(self) -> int:
        """Process id on ``node``, the same as in its heartbeat."""
        ...

    @property
    def node(self) -> str:
        """Host name of its machine, as ``socket.gethostname()`` returns it there."""
        ...

    async def wait(self) -> int:
        """Wait until it exits. Return the exit code, or minus the number of the signal that killed it.

        A process on a lost machine counts as killed by SIGKILL. May be awaited more than once.
        """
        ...

    def signal(self, number: int) -> None:
        """Send a signal without waiting; does nothing if it has exited."""
        ...


class Launcher(Protocol):
    """Starts processes; none of them outlives it, even if it is killed."""

    @property
    def places(self) -> bool:
        """Whether it chooses machine and GPUs itself (by num_gpus); if False, spec.gpus says which GPUs to use."""
        ...

    def connect(self) -> str:
        """Connect to the machines; called first, before the event loop runs. Return our address as they see it.

        Raises ConfigError if the machines cannot be reached or already have a run of this name.
        """
        ...

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        """Raise NoRoom if these can never run at the same time. Busy resources do not count: ``start`` waits."""
        ...

    async def start(self, spec: ProcessSpec) -> LaunchedProcess:
        """Start a process, on the GPUs that this name had before if they still exist.

        Raises NoRoom if no GPUs are free for it, LaunchError if starting failed but may succeed later.
        """
        ...

    async def release(self, name: str) -> None:
        """Free reservations of this name; its process has exited and will not be restarted."""
        ...

    async def close(self) -> None:
        """Stop everything and free all reservations."""
        ...
