"""A pool of judge processes, for judging that may never finish: one JSON line in, one JSON line out.

A judge is a module of asyncrl whose main calls ``serve`` (math.py). It writes {} when it is ready, then reads questions
until its standard input ends: [seconds, question]. It answers {"reward": 1.0}, {"error": "..."}, or {"reward": null} if
it needs more than ``seconds`` of CPU time.

Groups take turns. A group's time (reward.timeout_seconds, as CPU time) begins when it has a judge, so slow answers of
other groups cost it nothing. Each answer may use an equal share of what is left of it, and gets 0 if that is not
enough. Equal questions are asked once. A judge that is stuck, or whose group is cancelled, is killed, and another one
is started.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, TypeVar

from asyncrl import os_process
from asyncrl.errors import RewardError

log = logging.getLogger("asyncrl.rewards")

T = TypeVar("T")

_MAX_LINE_BYTES: Final = 2**20
_START_SECONDS: Final = 120.0
_GRACE_SECONDS: Final = 2.0


class JudgePool:
    """Up to ``processes`` judges. Each starts when it is first needed."""

    def __init__(self, module: str, arguments: Sequence[str], *, name: str, processes: int) -> None:
        """name   name of the reward, for error messages"""
        self._module, self._arguments, self._name = module, tuple(arguments), name
        self.seconds = 30.0
        """Time of one group; GuardedReward sets it to reward.timeout_seconds."""
        self.idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(processes)

    async def ask(self, questions: Sequence[Any]) -> list[float]:
        """Return the reward of each question. Raises RewardError if a judge reports an error or ends."""
        asked = [json.dumps(question) for question in questions]
        lines = list(dict.fromkeys(asked))
        rewards: dict[str, float | None] = {}
        async with self._places:
            judge = self.idle.pop() if self.idle else await self._start()
            try:
                left = self.seconds
                for place, line in enumerate(lines):
                    share = left / (len(lines) - place)
                    begin = time.monotonic()
                    try:
                        rewards[line] = await self._answer(judge, line, share)
                    except TimeoutError:  # stuck in C code, which signals do not interrupt
                        rewards[line] = 0.0
                        await _end(judge)
                        judge = await self._start()
                    # On a busy machine an answer takes longer than its CPU time; the others get their shares.
                    left -= min(time.monotonic() - begin, share)
            except BaseException:
                await _end(judge)
                raise
            self.idle.append(judge)
        if unjudged := list(rewards.values()).count(None):
            limit = f"were not judged within reward.timeout_seconds = {self.seconds:g} and count as wrong"
            extra = {"reason": limit}  # asyncrl.logs throttles by it
            log.warning(
                "reward %s: %d of %d different answers %s", self._name, unjudged, len(lines), limit, extra=extra
            )
        return [rewards[line] or 0.0 for line in asked]

    async def close(self) -> None:
        while self.idle:
            await _end(self.idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        """Return a judge that is ready. Raises RewardError."""
        judge = await asyncio.create_subprocess_exec(
            *(*os_process.module_command(self._module), *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._read(judge)
        except TimeoutError:
            await _end(judge)
            raise RewardError(f"reward {self._name}: a judge's process did not start in {_START_SECONDS:g} s") from None
        except BaseException:
            await _end(judge)
            raise
        return judge

    async def _answer(self, judge: asyncio.subprocess.Process, line: str, seconds: float) -> float | None:
        """Return the reward; None if ``seconds`` of CPU time are not enough. Raises TimeoutError if the judge is stuck,
        and RewardError.
        """
        assert judge.stdin is not None
        async with asyncio.timeout(2 * seconds + _GRACE_SECONDS):  # other processes may take half of its CPU
            try:
                judge.stdin.write(f"[{seconds}, {line}]\n".encode())
                await judge.stdin.drain()
            except OSError as error:
                raise RewardError(f"reward {self._name}: the judge's process is gone: {error}") from error
            answer = await self._read(judge)
        if "error" in answer:
            raise RewardError(f"reward {self._name}: {answer['error']}")
        reward = answer["reward"]
        return None if reward is None else float(reward)

    async def _read(self, judge: asyncio.subprocess.Process) -> dict[str, Any]:
        assert judge.stdout is not None
        try:
            line = await judge.stdout.readline()
        except OSError as error:
            raise RewardError(f"reward {self._name}: the judge's process is gone: {error}") from error
        if not line:
            code = await judge.wait()
            raise RewardError(f"reward {self._name}: the judge's process ended with code {code}")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _end(judge: asyncio.subprocess.Process) -> None:
    if judge.returncode is None:
        judge.kill()
    if judge.stdin is not None:
        judge.stdin.close()
    await judge.communicate()  # wait() could leave pipes open if the judge ended by itself


# -- in a judge's process ----------------------------------------------------------------------------------------------

_AGAIN_SECONDS: Final = 0.1
"""Interval of further signals: Python ignores an exception that is raised in a destructor."""


class BadLabel(ValueError):
    """A label that no answer can be compared with."""


def serve(judge: Callable[[Any], float], *, warm_up: Callable[[], object], limit: float = math.inf) -> None:
    """Answer questions until standard input ends.

    judge    returns the reward of a question; raises BadLabel
    warm_up  imports what every answer needs, before the first answer's time begins
    limit    seconds of CPU time after which an answer is wrong
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # keep output of libraries out of the answers
    warm_up()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        seconds, question = json.loads(line)
        try:
            reward = within(min(seconds, limit), functools.partial(judge, question))
            answer: dict[str, Any] = {"reward": 0.0 if reward is None and limit <= seconds else reward}
        except BadLabel as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


class OutOfTime(BaseException):
    """The time is used up. Not an Exception, because libraries handle those."""


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of ``call``; None if it does not end within ``seconds`` of CPU time. For the main thread.

    CPU time, so that a busy machine makes no answer wrong; and not the timer of ``signal.alarm``, which math-verify
    uses.
    """
    signal.signal(signal.SIGPROF, _raise_out_of_time)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except OutOfTime:
        return None


def _raise_out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
