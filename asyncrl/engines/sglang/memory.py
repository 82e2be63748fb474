"""Moves a server's memory off its GPUs and back, for a learner that shares them (run.colocated).

The server must be started with SERVER_ARGUMENTS, with torch-memory-saver installed. On a CPU nothing moves.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.engines.sglang.client import ServerClient
from asyncrl.errors import ConfigError, EngineError

SERVER_ARGUMENTS: Final[Mapping[str, Any]] = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
"""Weights are backed up on the host, because the engine may resume before newer weights arrive."""
_IDLE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.01


def check_installed() -> None:
    """Raise ConfigError if torch-memory-saver is not installed."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "run.colocated: SGLang releases GPUs with torch-memory-saver, which is not installed; "
            "pip install torch-memory-saver, or remove it"
        )


async def release(client: ServerClient) -> None:
    """Release the server's GPU memory. Raises EngineError if the server stays busy: a release would kill it then."""
    until = time.monotonic() + _IDLE_SECONDS
    while True:  # the last batch may end shortly after the last answer, and the server sends no notification
        try:
            await client.flush()
            break
        except EngineError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_LOOK_SECONDS)
    await client.order("/release_memory_occupation", {})


async def resume(client: ServerClient) -> None:
    """Allocate the server's GPU memory again."""
    await client.order("/resume_memory_occupation", {})
