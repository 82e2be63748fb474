"""A program that ends with everything that it has started: below a keeper (keeper.py), in a session of its own.

It ends when ``end`` is called, when whoever waits for it is cancelled, and when this process is gone, killed or not.
Tests: tests/unit/rollouts/harnesses/test_program.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.rollouts.agent.harnesses import keeper

_KEEPER: Final = Path(keeper.__file__)
_PATIENCE_SECONDS: Final = keeper.GIVE_UP_SECONDS + 5
_CHUNK: Final = 2**16


class Program:
    """``stdin``, ``stdout`` and ``stderr``: as of asyncio's Process, where ``start`` was given pipes."""

    def __init__(self, process: asyncio.subprocess.Process, control: int, *, memory_mib: int) -> None:
        self._process, self._control, self._memory_mib = process, control, memory_mib
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        directory: str = "",
        memory_mib: int = 0,
        **streams: Any,
    ) -> Program:
        """
        environment  all of it: nothing is inherited
        memory_mib   resident memory of the program and all below it, together; 0 is no limit
        streams      stdin, stdout and stderr, as subprocess takes them
        """
        read, write = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(_KEEPER),
                str(read),
                str(memory_mib),
                *command,
                env=dict(environment),
                cwd=directory or None,
                pass_fds=(read,),
                start_new_session=True,
                **streams,
            )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        return cls(process, write, memory_mib=memory_mib)

    @property
    def pid(self) -> int:
        """Of its keeper."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ended(self) -> str:
        """Wait until it ends by itself. Why it failed, in words; "" for exit code 0."""
        code = await self._process.wait()
        if code == keeper.OUT_OF_MEMORY and self._memory_mib:
            return f"took more than memory_mib = {self._memory_mib:,} of memory"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code else ""

    def kill(self) -> None:
        """Have it ended; returns at once."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    async def end(self) -> None:
        """Returns when it and all below it are gone; again is harmless."""
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._process.communicate()  # wait() may leave pipes open
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def last_bytes(stream: asyncio.StreamReader, *, keep: int, most: int) -> bytes:
    """What is read of ``stream`` until it ends: the last ``keep`` bytes. Raises ValueError after ``most``."""
    kept, total = b"", 0
    while chunk := await stream.read(_CHUNK):
        total += len(chunk)
        if total > most:
            raise ValueError(f"printed more than {most:,} bytes")
        kept = (kept + chunk)[-keep:]
    return kept
