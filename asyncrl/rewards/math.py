"""reward.kind = "math": 1 when the completion's last formula or number equals the label, as math-verify judges.

A label that is a choice ("A") or a word is a formula to math-verify, and a completion that is the same word is none: an
answer that reads like the label, boxed or alone, is right too.

The judging is sympy's and can take minutes or for ever on what models write. So it runs in processes of our own
(asyncrl/rewards/math_judge.py), which enforce a time limit inside, are killed when that does not help, and end with us.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from asyncrl.errors import ConfigError
from asyncrl.protocols import Sample
from asyncrl.rewards.answers import last_boxed
from asyncrl.rewards.judge_pool import JudgePool

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
    """Hands each group to a free judge."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        arguments = [str(options.timeout_seconds)]
        self._judges = JudgePool("asyncrl.rewards.math_judge", arguments, name="math", processes=options.processes)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        if any(sample.label is None for sample in samples):
            raise ValueError("the prompt has no label to compare to")
        return await self._judges.ask([[str(sample.label), sample.completion] for sample in samples])

    def vote(self, completion: str) -> str:
        """The text in the last \\boxed{}, else the last number: for majorities, which ask only what is the same."""
        if (found := last_boxed(completion)) is not None:
            return "".join(found.split())
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "") if numbers else ""

    async def close(self) -> None:
        await self._judges.close()
