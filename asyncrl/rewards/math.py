"""reward.kind = "math": 1 if the answer in the completion equals the label, as math-verify finds and judges it.

The answer is the last box; without one, what follows the last "answer is" and the like, else the last formula or
number.

A label is a formula with or without dollars ("36\\pi"), or a sentence, of which the last formula or number counts.
math-verify parses a label that is a choice ("A") or a word as a formula, but finds no formula in a completion that is
the same word. Therefore an answer whose text equals the label, boxed or alone, is right too.

Judging uses sympy, which can take minutes or never finish on the formulas that models write. It therefore runs in
separate processes, whose ``main`` is here. They enforce a time limit themselves, are killed if that fails, and
end with the worker.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import OPEN_BOX, bare, last_boxed
from asyncrl.rewards.judge_pool import JudgePool, within
from asyncrl.rewards.port import Sample

_DELIMITED: Final = re.compile(r"(?<!\\)(?:\$|\\[(\[])|\\boxed")
_WORDS: Final = re.compile(r"(?<!\S)(?!and\b)[A-Za-z]{3,}\b|\*\*|####")
_SPACED_NUMBER: Final = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SCIENTIFIC: Final = re.compile(r"(-?\d+(?:\.\d*)?)[eE]([+-]?\d+)")
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
        self._judges = JudgePool("asyncrl.rewards.math", arguments, name="math", processes=options.processes)

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


# -- in a judge's process: a JSON line [seconds, [label, completion]] in, {"reward": 1.0} out --------------------------


def main() -> None:
    timeout_seconds = int(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # keep output of libraries out of the answers
    logging.disable(logging.ERROR)  # math-verify logs a traceback for every timeout; the reward is just 0
    judge("1", "2", timeout_seconds=60)  # imports and compiles what every answer needs
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        seconds, pair = json.loads(line)
        try:
            reward = within(seconds, functools.partial(judge, *pair, timeout_seconds=timeout_seconds))
            answer: dict[str, Any] = {"reward": reward}
        except LabelError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


class LabelError(Exception):
    """A label contains no number or formula."""


def judge(label: str, completion: str, *, timeout_seconds: int) -> float:
    """Return 1.0 if the last answer in ``completion`` equals ``label``, else 0.0. Boxed answers take precedence."""
    from math_verify import verify
    from math_verify.errors import TimeoutException

    boxed = last_boxed(completion)
    if bare(completion if boxed is None else boxed) == bare(label) != "":
        return 1.0
    gold = next(filter(None, (_parse(form, timeout_seconds) for form in _forms(label))), None)
    if gold is None:
        raise LabelError(f"the label {label[:60]!r} holds no number or formula")
    try:
        found = _parse(OPEN_BOX.sub(r"\\boxed{", completion), timeout_seconds)
        return float(bool(found) and verify(gold, found, timeout_seconds=timeout_seconds))
    except (TimeoutException, RecursionError, MemoryError):
        return 0.0


def _parse(text: str, timeout_seconds: int) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    found: list[Any] = parse(text, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=timeout_seconds)
    return found


def _forms(label: str) -> tuple[str, str]:
    """Return what to parse as the label, the better form first.

    Labels are mostly formulas without dollars ("36\\pi"), of which math-verify finds only a number (36) unless dollars
    are put around them. In a sentence it finds the number at the end, but not with dollars.
    """
    label = label.strip()
    if number := _SCIENTIFIC.fullmatch(label):
        label = rf"{number[1]} \cdot 10^{{{number[2]}}}"
    is_sentence = "\\" not in label and _WORDS.search(label) is not None
    if is_sentence or _DELIMITED.search(label) or _SPACED_NUMBER.fullmatch(label):
        return label, f"${label}$"
    return f"${label}$", label


if __name__ == "__main__":
    main()
