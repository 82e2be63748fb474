"""Tool use in two turns: the model asks a calculator, reads the result, and answers.

The demo's prompts start a count in octal, such as "567". The right answer is the next digit, "0". The calculator adds
one to an octal digit, so the best question is the last digit of the prompt: "567" "7" "0" "0".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.environments.port import Generate
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.messages import PromptGroup, Trajectory

DIGITS = "01234567"


@dataclass(frozen=True, kw_only=True)
class Options:
    """[rollout.options] of the run file."""

    question_reward: float = 0.5
    """Share of the reward of 1 that the right question earns; the rest is for the right answer."""


class Calculator:
    """A RolloutFn: built once per worker, called for every sample."""

    def __init__(self, tokenizer: Any, options: Options) -> None:
        self._tokenizer, self._options = tokenizer, options

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        turns = TrajectoryBuilder(prompt.prompt_tokens)
        question = turns.add_answer(await generate(turns.tokens, max_new_tokens=1))
        result = plus_one(self._tokenizer.decode(question.tokens))
        turns.add_observation(self._tokenizer.encode(result, add_special_tokens=False))
        answer = turns.add_answer(await generate(turns.tokens, max_new_tokens=1))
        right, share = prompt.label[0], self._options.question_reward
        parts = {
            "asked": share * (result == right),
            "answered": (1 - share) * (self._tokenizer.decode(answer.tokens) == right),
        }
        return turns.trajectory(reward=sum(parts.values()), reward_parts=parts, finish_reason="stop")


def plus_one(digit: str) -> str:
    """Return the octal digit after ``digit``, without carry; "" for anything else."""
    return DIGITS[(int(digit) + 1) % len(DIGITS)] if digit in tuple(DIGITS) else ""
