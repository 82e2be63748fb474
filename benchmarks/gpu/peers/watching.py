"""What every arm of a peer needs around its processes: their environment, and looks at the engine that they use."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from benchmarks.gpu.fleet import running_and_waiting
from benchmarks.gpu.peers.window import Look

LOOK_SECONDS: Final = 0.1


def say(*words: object) -> None:
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def environment() -> dict[str, str]:
    """Bytecode is kept: the processes import thousands of modules each."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONUNBUFFERED": "1", "NCCL_NVLS_ENABLE": "0"}


def look(url: str, looks: list[Look], over: threading.Event) -> None:
    """What the engine runs, until ``over``; where it does not answer there is no look."""
    while not over.wait(LOOK_SECONDS):
        try:
            running, waiting = running_and_waiting(url)
        except (OSError, ValueError, KeyError):
            continue
        looks.append((time.time(), running, waiting))
