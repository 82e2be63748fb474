"""Faults that a storm applies to a process for some seconds without killing it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.chaos.victims import Deed, Role
from tests.harness.faults.injections import full_disk, kept_full, no_descriptors, no_memory, stopped

BACK_SECONDS: Final = 3600.0
_OF_A_PROCESS: Final[Mapping[Deed, Callable[[int], contextlib.AbstractContextManager[None]]]] = {
    "stop": stopped,
    "no disk": full_disk,
    "no descriptors": no_descriptors,
    "no memory": no_memory,
}


@contextlib.contextmanager
def of(deed: Deed, pid: int, *, folder: Path, role: Role, disk: Path | None = None) -> Iterator[None]:
    """Apply the fault while the context is open. Ignores a process that has already ended.

    folder  folder where processes look for their clock
    """
    with contextlib.ExitStack() as stack:
        if deed == "clock set back":
            stack.enter_context(_set_back(_clock(folder, role)))
        elif deed == "full":
            assert disk is not None
            stack.enter_context(kept_full(disk))
        else:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                stack.enter_context(_OF_A_PROCESS[deed](pid))
        yield


@contextlib.contextmanager
def of_all(deed: Deed, pids: Iterable[int], *, folder: Path, role: Role, disk: Path | None = None) -> Iterator[None]:
    """Like ``of``, for several processes at once."""
    with contextlib.ExitStack() as stack:
        for pid in pids:
            stack.enter_context(of(deed, pid, folder=folder, role=role, disk=disk))
        yield


def _clock(folder: Path, role: Role) -> Path:
    return folder / f"clock.{role}"


@contextlib.contextmanager
def _set_back(clock: Path) -> Iterator[None]:
    clock.touch()
    try:
        yield
    finally:
        clock.unlink(missing_ok=True)


def follow_clock(folder: Path, *, role: Role) -> None:
    """From now on, this process's clock is an hour behind while the folder says so."""
    real, sign = time.time, _clock(folder, role)
    time.time = lambda: real() - BACK_SECONDS * sign.exists()
