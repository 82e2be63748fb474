"""A pool of judge processes, for judging that may never finish: one JSON line in, one JSON line out.

A judge is a module of asyncrl with a ``main`` that reads lines until its standard input ends (math_judge.py). It limits
its own time. If a group is cancelled while a judge works on it (reward.timeout_seconds), the judge is killed and the
next group gets a new one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from asyncrl.errors import RewardError

_MAX_LINE_BYTES: Final = 2**20


class JudgePool:
    """Up to ``processes`` judges. Each starts when it is first needed."""

    def __init__(self, module: str, arguments: Sequence[str], *, name: str, processes: int) -> None:
        """name   name of the reward, for error messages"""
        self._module, self._arguments, self._name = module, tuple(arguments), name
        self.idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(processes)

    async def ask(self, question: Any) -> list[float]:
        """Return the rewards from a free judge. Raises RewardError if the judge reports an error or is gone."""
        async with self._places:
            judge = self.idle.pop() if self.idle else await self._start()
            try:
                rewards = await self._answer(judge, question)
            except BaseException:
                await _end(judge)
                raise
            self.idle.append(judge)
        return rewards

    async def close(self) -> None:
        while self.idle:
            await _end(self.idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )

    async def _answer(self, judge: asyncio.subprocess.Process, question: Any) -> list[float]:
        assert judge.stdin is not None and judge.stdout is not None
        try:
            judge.stdin.write(json.dumps(question).encode() + b"\n")
            await judge.stdin.drain()
            line = await judge.stdout.readline()
        except OSError as error:
            raise RewardError(f"reward {self._name}: the judge's process is gone: {error}") from error
        if not line:
            code = await judge.wait()
            raise RewardError(f"reward {self._name}: the judge's process ended with code {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise RewardError(f"reward {self._name}: {answer['error']}")
        return [float(value) for value in answer["rewards"]]


async def _end(judge: asyncio.subprocess.Process) -> None:
    if judge.returncode is None:
        judge.kill()
    if judge.stdin is not None:
        judge.stdin.close()
    await judge.communicate()  # wait() could leave pipes open if the judge ended by itself
