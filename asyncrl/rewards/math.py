"""reward.kind = "math": 1 if the answer in the completion equals the label, as math-verify finds and judges it.

The answer is the last box; without one, what follows the last "answer is" and the like, else the last formula or
number.

A label is a formula with or without dollars ("36\\pi"), or a sentence, of which the last formula or number counts.
math-verify parses a label that is a choice ("A") or a word as a formula, but finds no formula in a completion that is
the same word. Therefore an answer whose text equals the label, boxed or alone, is right too.

Judging uses sympy, which can take minutes or never finish on the formulas that models write. It therefore runs in
separate processes (asyncrl/rewards/math_judge.py). They enforce a time limit themselves, are killed if that fails, and
end with the worker.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import bare, last_boxed
from asyncrl.rewards.judge_pool import JudgePool
from asyncrl.rewards.port import Sample

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    processes: int = 1
    """Number of judge processes per rollout worker, about 150 MB each."""
    timeout_seconds: int = 2
    """Time limit for parsing one answer, and again for comparing it; an answer that takes longer is wrong. So is
    one that takes more than its share of reward.timeout_seconds."""

    def __post_init__(self) -> None:
        if self.processes < 1 or self.timeout_seconds < 1:
            raise ConfigError("processes and timeout_seconds must be >= 1")
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward.kind = \"math\" needs math-verify: pip install 'asyncrl[math]'")


class MathReward:
    """Sends each group to a free judge."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        arguments = [str(options.timeout_seconds)]
        self._judges = JudgePool("asyncrl.rewards.math_judge", arguments, name="math", processes=options.processes)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        if any(sample.label is None for sample in samples):
            raise ValueError("the prompt has no label to compare to")
        return await self._judges.ask([[str(sample.label), sample.completion] for sample in samples])

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        check_label(label)

    def vote(self, completion: str) -> str:
        """Return the text in the last \\boxed{}, else the last number. Majority votes only test them for equality."""
        if (found := last_boxed(completion)) is not None:
            return "".join(found.split())
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "") if numbers else ""

    def limit_groups(self, seconds: float) -> None:
        self._judges.seconds = seconds

    async def close(self) -> None:
        await self._judges.close()


def check_label(label: Any) -> None:
    """Raise ValueError if the label is empty, to which no answer can be equal."""
    if not bare(str(label)):
        raise ValueError(f"the label {str(label)!r} is empty")
