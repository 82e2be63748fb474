"""What a storm does to a process for some seconds without killing it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.chaos.victims import Deed
from tests.harness.faults.injections import full_disk, no_descriptors, no_memory, stopped

BACK_SECONDS: Final = 3600.0
_CLOCK: Final = "clock.set_back"
_OF_A_PROCESS: Final[Mapping[Deed, Callable[[int], contextlib.AbstractContextManager[None]]]] = {
    "stop": stopped,
    "no disk": full_disk,
    "no descriptors": no_descriptors,
    "no memory": no_memory,
}


@contextlib.contextmanager
def of(deed: Deed, pid: int, *, folder: Path) -> Iterator[None]:
    """``folder``: where processes look for their clock. A process that is gone by now is let off."""
    with contextlib.ExitStack() as stack:
        if deed == "clock set back":
            stack.enter_context(_clock_set_back(folder))
        else:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                stack.enter_context(_OF_A_PROCESS[deed](pid))
        yield


@contextlib.contextmanager
def _clock_set_back(folder: Path) -> Iterator[None]:
    (folder / _CLOCK).touch()
    try:
        yield
    finally:
        (folder / _CLOCK).unlink(missing_ok=True)


def follow_clock(folder: Path) -> None:
    """From now on this process's clock is an hour behind while the folder says so."""
    real, sign = time.time, folder / _CLOCK
    time.time = lambda: real() - BACK_SECONDS * sign.exists()
