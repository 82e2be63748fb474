"""What a sandbox is: it runs one program with limits, and says how that ended.

A sandbox that cannot start on this machine is refused (``check``); none is ever replaced by a weaker one.
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
    """What one program may use. A program over a limit is ended with all that it has started.

    seconds     from its start to its end
    memory_mib  addresses of each process, and pages of all of them together
    disk_mib    of a file, and of all files where the sandbox has a disk of its own
    output_kib  of its standard output, and again of its standard error
    processes   it and all that it has started, at once
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

    code     its exit status; -N when the signal N ended it
    stopped  the limit that it was ended for; empty: it ended by itself, or the kernel ended it
    """

    code: int
    stdout: bytes
    stderr: bytes
    stopped: Stopped
    seconds: float


NO_FILES: Final[Mapping[str, bytes]] = {}


class Sandbox(Protocol):
    """Made once with the folders that its programs may read; ``run`` may be called from many threads at once."""

    def __init__(self, *, readable: Sequence[str], network: bool) -> None: ...

    def run(
        self, command: Sequence[str], *, limits: Limits, stdin: bytes = b"", files: Mapping[str, bytes] = NO_FILES
    ) -> Outcome:
        """Runs ``command`` in a folder of its own that holds ``files``, by their names; both are gone afterwards.

        Blocks for limits.seconds at most. Raises OSError when it cannot be started.
        """
        ...

    def check(self) -> None:
        """Starts it once. Raises ConfigError where it is missing or cannot start, with what to do about that."""
        ...
