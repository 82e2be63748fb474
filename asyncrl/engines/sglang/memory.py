"""Moves a server's memory off its GPUs and back, for a learner that shares them (run.colocated).

The server must be started with SERVER_ARGUMENTS, with torch-memory-saver installed. On a CPU nothing moves.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrl.engines.sglang.client import ServerClient
from asyncrl.errors import ConfigError, EngineDied, EngineError

SERVER_ARGUMENTS: Final[Mapping[str, Any]] = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
"""Weights are backed up on the host, because the engine may resume before newer weights arrive."""
_IDLE_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.01
ROOM_SECONDS: Final = 30.0
"""Processes that were killed give their memory back within seconds."""
_LOOK_AT_GPUS_SECONDS: Final = 0.1

log = logging.getLogger(__name__)


def check_memory_saver() -> None:
    """Raise ConfigError if torch-memory-saver is not installed."""
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise ConfigError(
            "run.colocated: SGLang releases GPUs with torch-memory-saver, which is not installed; "
            "pip install torch-memory-saver, or remove it"
        )


class GpuMemory:
    """The memory of one server. Test: tests/unit/engines/sglang/test_memory.py."""

    def __init__(
        self,
        client: ServerClient,
        *,
        free_bytes: Callable[[], Mapping[str, int]] | None = None,
        room_seconds: float = ROOM_SECONDS,
    ) -> None:
        """
        free_bytes    returns the free memory of each GPU, if that is known
        room_seconds  time for others to free the memory that the server had
        """
        self._client = client
        self._free_bytes = free_bytes or read_free_bytes
        self._room_seconds = room_seconds
        self._needed: dict[str, int] = {}

    async def release(self) -> None:
        """Release the server's GPU memory. Raises EngineError if the server stays busy: a release would kill it
        then."""
        until = time.monotonic() + _IDLE_SECONDS
        while True:  # the last batch may end shortly after the last answer, and the server sends no notification
            try:
                await self._client.flush()
                break
            except EngineError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_LOOK_SECONDS)
        before = await self._free()
        await self._client.order("/release_memory_occupation", {})
        for gpu, free in (await self._free()).items():
            released = max(0, free - before.get(gpu, free))
            # The least of all times: another server of the same GPU may release at the same time.
            self._needed[gpu] = min(released, self._needed.get(gpu, released))

    async def resume(self) -> None:
        """Allocate the server's GPU memory again, once it is free. Raises EngineDied: with too little memory the
        server's processes exit, so it can be asked only once."""
        problem = await self._room()
        try:
            await self._client.order("/resume_memory_occupation", {})
        except EngineDied as error:
            if problem:
                raise EngineDied(f"{problem}: {error}") from error
            raise

    async def _room(self) -> str:
        """Wait until every GPU has room for the server. Returns what is missing if it has none for too long.

        waits for: others' memory    woken by: the clock
        """
        until = time.monotonic() + self._room_seconds
        while problem := self._missing(await self._free()):
            if time.monotonic() > until:
                log.warning("%s", problem)
                return problem
            await asyncio.sleep(_LOOK_AT_GPUS_SECONDS)
        return ""

    def _missing(self, free: Mapping[str, int]) -> str:
        short = (
            f"GPU {gpu} has {free[gpu] / 2**30:.1f} GiB free, and the engine needs {needed / 2**30:.1f} GiB"
            for gpu, needed in self._needed.items()
            if free.get(gpu, needed) < needed
        )
        found = "; ".join(short)
        return found and (
            f"run.colocated: {found}, {self._room_seconds:g} s after the learner left; the metrics "
            "learner/rank*/used_memory_bytes tell what it left in use; lower mem-fraction-static in "
            "engine.options.server_arguments, or end other processes on that GPU"
        )

    async def _free(self) -> Mapping[str, int]:
        return await asyncio.to_thread(self._free_bytes)


_LIBRARY: Final = "pynvml"
"""Package nvidia-ml-py, which SGLang needs on GPUs."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def read_free_bytes(
    environment: Mapping[str, str] = os.environ, *, load: Callable[[str], Any] = importlib.import_module
) -> dict[str, int]:
    """Return the free bytes of each visible GPU, by its number or UUID; nothing where the driver does not tell.

    From NVIDIA's management library, which is imported nowhere else. CUDA could tell as well, but its context would
    itself take half a gigabyte of each GPU.

    On a machine with GPUs of several kinds, CUDA's numbers may be of other GPUs unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    try:
        library = load(_LIBRARY)
    except ImportError:
        return {}
    try:
        library.nvmlInit()
    except library.NVMLError:  # no driver
        return {}
    try:
        found = {name: _free(library, name) for name in _visible(library, environment)}
    finally:
        library.nvmlShutdown()
    return {name: free for name, free in found.items() if free is not None}


def _visible(library: Any, environment: Mapping[str, str]) -> list[str]:
    if _VISIBLE in environment:
        return [name for name in map(str.strip, environment[_VISIBLE].split(",")) if name]
    return list(map(str, range(library.nvmlDeviceGetCount())))


def _free(library: Any, name: str) -> int | None:
    try:
        of_name = library.nvmlDeviceGetHandleByIndex if name.isdecimal() else library.nvmlDeviceGetHandleByUUID
        return int(library.nvmlDeviceGetMemoryInfo(of_name(int(name) if name.isdecimal() else name)).free)
    except library.NVMLError:
        return None
