"""The interface of a sandbox: it runs one program with limits and reports how the program ended.

A sandbox that cannot start on this machine is refused (``check``). It is never replaced by a weaker one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from asyncrl.errors import ConfigError

MIB: Final = 2**20

Stopped = Literal["", "time", "output", "processes", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program. A program that exceeds one is ended with all its descendants.

    seconds     wall-clock time from start to end
    memory_mib  address space of each process, and resident memory of all processes together
    disk_mib    size of a file, and of all files together if the sandbox has its own disk
    output_kib  size of standard output, and again of standard error
    processes   number of concurrent processes, the program and its descendants
    """

    seconds: float = 10.0
    memory_mib: int = 512
    disk_mib: int = 64
    output_kib: int = 1024
    processes: int = 32

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mib", "disk_mib", "output_kib", "processes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended.

    code     exit status; -N if signal N ended it
    stopped  the limit that it exceeded; empty: it ended by itself, or the kernel ended it
    """

    code: int
    stdout: bytes
    stderr: bytes
    stopped: Stopped
    seconds: float


NO_FILES: Final[Mapping[str, bytes]] = {}


class Sandbox(Protocol):
    """Runs programs in isolation. ``run`` may be called from many threads at once.

    readable  folders that programs may read
    network   whether programs may use the network
    """

    def __init__(self, *, readable: Sequence[str], network: bool) -> None: ...

    def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b"", files: Mapping[str, bytes] = NO_FILES
    ) -> Outcome:
        """Run ``command`` in a temporary folder with ``files`` (name to content). Both are gone afterwards.

        Blocks for at most limits.seconds. Raises OSError if the command cannot be started.
        """
        ...

    def check(self) -> None:
        """Start the sandbox once. Raises ConfigError, with advice, if it is missing or cannot start."""
        ...
