"""reward.kind = "deepscaler": a boxed mathematical answer after the reasoning (DeepScaleR, Luo et al. 2025).

The reward is 1 if the last \\boxed{} after </think> equals the label (or the label's own \\boxed{}), as math-verify
judges. It is 0 without </think> or without a box. A label may be a list; one match is enough. DeepScaleR itself uses
two other judges, so results can differ for formulas that not all three judges can read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.rewards import math
from asyncrl.rewards.answers import after_thinking, ends_thinking, last_boxed
from asyncrl.rewards.labels import label_texts
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(math.Options):
    needs_thinking: bool = True
    """True: a completion without </think> is wrong. False: its last box counts."""


class DeepScalerReward(math.MathReward):
    def __init__(self, options: Options) -> None:
        super().__init__(options, name="deepscaler")
        self._needs_thinking = options.needs_thinking

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Judge all labels of all samples in one turn. The reward of a sample is the best over its labels."""
        pairs: list[list[str]] = []
        owners: list[int] = []
        for number, sample in enumerate(samples):
            labels = _labels(sample.label)
            if not sample.answer or not (answer := self.vote(sample.completion)):
                continue
            for label in labels:
                pairs.append([label, f"\\boxed{{{answer}}}"])
                owners.append(number)
        rewards = [0.0] * len(samples)
        for number, reward in zip(owners, await self._judges.ask(pairs) if pairs else (), strict=True):
            rewards[number] = max(rewards[number], reward)
        return rewards

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        _labels(label)

    def vote(self, completion: str) -> str:
        """Return the text that is compared with the label; "" if there is none."""
        if self._needs_thinking and not ends_thinking(completion):
            return ""
        return (last_boxed(after_thinking(completion)) or "").strip()


def _labels(label: Any) -> list[str]:
    """Return the formulas of a label. Raises ValueError."""
    found = []
    for text in label_texts(label):
        boxed = last_boxed(text)
        found.append(math.formula_of(text if boxed is None else boxed))
    return found
