"""A program that runs below a keeper (keeper.py) in its own session, and ends together with everything it started.

It ends when ``end`` is called, when the task that waits for it is cancelled, or when this process exits or is killed.
Tests: tests/unit/environments/harnesses/test_command.py.
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

from asyncrl import keeper

_KEEPER: Final = Path(keeper.__file__)
_PATIENCE_SECONDS: Final = keeper.GIVE_UP_SECONDS + 5
_CHUNK: Final = 2**16
GONE: Final = (BrokenPipeError, ConnectionResetError, RuntimeError)
"""What writing to a program that has ended raises. RuntimeError is uvloop's, for a pipe that it has closed itself."""


class Program:
    """A running program. ``stdin``, ``stdout`` and ``stderr`` are as in asyncio's Process if ``start`` got pipes."""

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
        environment  the whole environment; nothing is inherited
        memory_mib   limit for the resident memory of the program and its descendants together; 0: no limit
        streams      stdin, stdout and stderr, as for subprocess
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
        """Process id of the keeper."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the program ends by itself. Returns its exit code; -N if signal N ended it."""
        return await self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait_for_problem(self) -> str:
        """Wait until the program ends by itself. Return why it failed, in words; "" for exit code 0."""
        code = await self.wait()
        if code == keeper.OUT_OF_MEMORY and self._memory_mib:
            return f"took more than memory_mib = {self._memory_mib:,} of memory"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code else ""

    def kill(self) -> None:
        """Make the keeper end the program. Returns at once."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    async def end(self) -> None:
        """End the program and all its descendants, and wait until they are gone. Safe to repeat."""
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._process.communicate()  # wait() could leave pipes open
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def last_bytes(stream: asyncio.StreamReader, *, keep: int, most: int) -> bytes:
    """Read ``stream`` to its end and return the last ``keep`` bytes. Raises ValueError after ``most`` bytes."""
    kept, total = b"", 0
    while chunk := await stream.read(_CHUNK):
        total += len(chunk)
        if total > most:
            raise ValueError(f"printed more than {most:,} bytes")
        kept = (kept + chunk)[-keep:]
    return kept
