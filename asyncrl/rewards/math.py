"""reward.kind = "math": 1 when the completion's last formula or number equals the label, as math-verify judges.

The judging is sympy's and can take minutes or for ever on what models write. So it runs in processes of our own
(asyncrl/rewards/math_judge.py), which enforce a time limit inside, are killed when that does not help, and end with us.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncrl.errors import ConfigError, RewardError
from asyncrl.protocols import Sample

_MAX_LINE_BYTES: Final = 2**20
_BOXED: Final = "\\boxed{"
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    processes: int = 1
    """Judges per rollout worker, about 150 MB each."""
    timeout_seconds: int = 2
    """Limit for parsing, and again for comparing, one answer; one that takes longer is wrong. All answers of a group
    must fit into reward.timeout_seconds, or the group fails."""

    def __post_init__(self) -> None:
        if self.processes < 1 or self.timeout_seconds < 1:
            raise ConfigError("processes and timeout_seconds must be >= 1")
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward.kind = \"math\" needs math-verify: pip install 'asyncrl[math]'")


class MathReward:
    """Hands each group to a free judge. A judge that was interrupted or died is replaced by a new one."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self._idle: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(options.processes)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        if any(sample.label is None for sample in samples):
            raise ValueError("the prompt has no label to compare to")
        pairs = [[str(sample.label), sample.completion] for sample in samples]
        async with self._places:
            judge = self._idle.pop() if self._idle else await self._start()
            try:
                rewards = await _ask(judge, pairs)
            except BaseException:
                await _end(judge)
                raise
            self._idle.append(judge)
        return rewards

    def vote(self, completion: str) -> str:
        """The text in the last \\boxed{}, else the last number: for majorities, which ask only what is the same."""
        begin = completion.rfind(_BOXED)
        if begin >= 0:
            return "".join(_inside(completion[begin + len(_BOXED) :]).split())
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "") if numbers else ""

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncrl.rewards.math_judge",
            str(self._options.timeout_seconds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )


def _inside(text: str) -> str:
    """Up to the brace that closes what was opened before ``text``; all of it if none does."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:place]
    return text


async def _ask(judge: asyncio.subprocess.Process, pairs: list[list[str]]) -> list[float]:
    assert judge.stdin is not None and judge.stdout is not None
    try:
        judge.stdin.write(json.dumps(pairs).encode() + b"\n")
        await judge.stdin.drain()
        line = await judge.stdout.readline()
    except OSError as error:
        raise RewardError(f"reward math: the judge's process is gone: {error}") from error
    if not line:
        raise RewardError(f"reward math: the judge's process ended with code {await judge.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise RewardError(f"reward math: {answer['error']}")
    return [float(value) for value in answer["rewards"]]


async def _end(judge: asyncio.subprocess.Process) -> None:
    if judge.returncode is None:
        judge.kill()
    if judge.stdin is not None:
        judge.stdin.close()
    await judge.communicate()  # wait() may leave the pipe of a judge that ended by itself open
