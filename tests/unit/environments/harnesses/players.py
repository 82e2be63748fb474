"""A user's harnesses, which child processes import."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Options:
    factor: float = 1.0


class Player:
    def __init__(self, options: Options) -> None:
        self._factor, self._count = options.factor, 0

    async def __call__(self, task, endpoint):  # type: ignore[no-untyped-def]
        self._count += 1
        reward = float(task.label) * self._factor
        return {"reward": reward, "metrics": {"pid": os.getpid(), "played": self._count, "key": len(endpoint.api_key)}}


def plain(task, endpoint):  # type: ignore[no-untyped-def]
    return 0.5


TOGETHER = threading.Barrier(40, timeout=60)


def meets(task, endpoint):  # type: ignore[no-untyped-def]
    """Blocks its thread until forty samples do."""
    TOGETHER.wait()
    return 1.0


async def unreachable(task, endpoint):  # type: ignore[no-untyped-def]
    raise RuntimeError("no page") from ConnectionRefusedError()


async def refuses(task, endpoint):  # type: ignore[no-untyped-def]
    raise ValueError(f"no {task.label} here")


async def leaves(task, endpoint):  # type: ignore[no-untyped-def]
    os._exit(9)


async def hoards(task, endpoint):  # type: ignore[no-untyped-def]
    hoards.held = b"x" * (64 * 2**20)  # type: ignore[attr-defined]
    return {"reward": 1.0, "metrics": {"pid": os.getpid()}}


def names_proxies(task, endpoint):  # type: ignore[no-untyped-def]
    """Whether the standard library would ask a proxy for the endpoint, and for another host."""
    others = {host: not urllib.request.proxy_bypass(host) for host in (endpoint.base_url.split("/")[2], "a.org")}
    return {"reward": 0.0, "metrics": dict(zip(("endpoint", "other"), others.values(), strict=True))}


async def waits(task, endpoint):  # type: ignore[no-untyped-def]
    """Records that it has begun, and records its cancellation."""
    folder = Path(task.prompt)
    (folder / "begun").write_text(f"{os.getpid()}\n")
    try:
        await asyncio.sleep(1000)
    finally:
        (folder / "cancelled").write_text("yes\n")


async def blocks(task, endpoint):  # type: ignore[no-untyped-def]
    """Blocks its event loop forever and has started a program."""
    if task.prompt:
        command = [sys.executable, "-S", "-I", "-c", "import time; time.sleep(1000)"]
        program = subprocess.Popen(command)  # noqa: ASYNC220 - as users do
        (Path(task.prompt) / "begun").write_text(f"{program.pid}\n")
        time.sleep(1000)  # noqa: ASYNC251 - as users do
    await asyncio.sleep(1000)
