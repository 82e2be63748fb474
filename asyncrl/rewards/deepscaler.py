"""reward.kind = "deepscaler": mathematics after the thinking, in a box (DeepScaleR, Luo et al. 2025).

1 when what the last \\boxed{} after </think> holds equals the label (or what the label's own \\boxed{} holds), as
math-verify judges; 0 without an end of the thinking or without a box. A label may be a list: one of them is enough.
DeepScaleR compares by two judges of its own; formulas that only one of the three can read differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.protocols import Sample
from asyncrl.rewards import math
from asyncrl.rewards.answers import END_OF_THINKING, after_thinking, last_boxed
from asyncrl.rewards.judge_pool import JudgePool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(math.Options):
    needs_thinking: bool = True
    """A completion without </think> is wrong. False: its last box counts all the same."""


class DeepScalerReward:
    needs_label = True

    def __init__(self, options: Options) -> None:
        self._needs_thinking = options.needs_thinking
        arguments = [str(options.timeout_seconds)]
        self._judges = JudgePool(
            "asyncrl.rewards.math_judge", arguments, name="deepscaler", processes=options.processes
        )

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """All labels of all samples in one question; a sample's reward is the best of its labels."""
        pairs: list[list[str]] = []
        owners: list[int] = []
        for number, sample in enumerate(samples):
            if sample.label is None:
                raise ValueError("the prompt has no label to compare to")
            if not (answer := self.vote(sample.completion)):
                continue
            for label in sample.label if isinstance(sample.label, list | tuple) else [sample.label]:
                boxed = last_boxed(str(label))
                pairs.append([str(label) if boxed is None else boxed, f"\\boxed{{{answer}}}"])
                owners.append(number)
        rewards = [0.0] * len(samples)
        for number, reward in zip(owners, await self._judges.ask(pairs) if pairs else (), strict=True):
            rewards[number] = max(rewards[number], reward)
        return rewards

    def vote(self, completion: str) -> str:
        """What is compared with the label; "" if there is nothing."""
        if self._needs_thinking and END_OF_THINKING not in completion:
            return ""
        return (last_boxed(after_thinking(completion)) or "").strip()

    async def close(self) -> None:
        await self._judges.close()
