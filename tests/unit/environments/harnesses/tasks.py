"""Shared by the harness tests: a task, an endpoint that is not served, and short programs."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from asyncrl.environments.agent.harnesses.protocol import Endpoint, Task

TASK = Task(prompt="What is 3 + 4?", label="7", metadata={"row": 1}, group_id=5, index=2, seed=11)
ENDPOINT = Endpoint(base_url="http://127.0.0.1:1234", api_key="key-of-this-sample", model="policy")


def python(script: str) -> list[str]:
    """A command that runs ``script`` in a Python without site packages, which starts fast."""
    return [sys.executable, "-S", "-I", "-c", script]


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_gone(pid: int) -> None:
    while not is_gone(pid):
        await asyncio.sleep(0.01)


async def read_when_there(path: Path) -> str:
    while not (text := _text(path)).endswith("\n"):
        await asyncio.sleep(0.01)
    return text


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


ENVIRONMENT = {"PATH": os.environ["PATH"]}
