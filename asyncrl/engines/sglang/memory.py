"""A server's memory leaves its GPUs, and comes back: for a learner that shares them (run.colocated).

The server was started with SERVER_ARGUMENTS, and torch-memory-saver is installed beside it; on a CPU nothing leaves.
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
"""Weights are kept on the host: the next turn may begin before newer ones are there."""
_IDLE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.01


def check_installed() -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "run.colocated: SGLang releases GPUs with torch-memory-saver, which is not installed; "
            "pip install torch-memory-saver, or remove it"
        )


async def release(client: ServerClient) -> None:
    """Raises EngineError when the server goes on working; it would end if it were told to leave then."""
    until = time.monotonic() + _IDLE_SECONDS
    while True:  # its last batch may end a moment after the last answer: nobody announces it
        try:
            await client.flush()
            break
        except EngineError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_LOOK_SECONDS)
    await client.order("/release_memory_occupation", {})


async def resume(client: ServerClient) -> None:
    await client.order("/resume_memory_occupation", {})
