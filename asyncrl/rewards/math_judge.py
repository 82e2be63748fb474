"""The judge process for mathematics: a JSON line [seconds, [label, completion]] in, {"reward": 1.0} out.

math-verify limits its time with signals. Signals work only in a process's main thread, so judging has its own process.
It ends when its standard input ends.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from typing import Any, Final

from asyncrl.rewards.answers import OPEN_BOX, bare, last_boxed
from asyncrl.rewards.time_limit import within

_DELIMITED: Final = re.compile(r"(?<!\\)(?:\$|\\[(\[])|\\boxed")
_WORDS: Final = re.compile(r"(?<!\S)(?!and\b)[A-Za-z]{3,}\b|\*\*|####")
_SPACED_NUMBER: Final = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SCIENTIFIC: Final = re.compile(r"(-?\d+(?:\.\d*)?)[eE]([+-]?\d+)")


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
    gold = next(filter(None, (_parsed(form, timeout_seconds) for form in _forms(label))), None)
    if gold is None:
        raise LabelError(f"the label {label[:60]!r} holds no number or formula")
    try:
        found = _parsed(OPEN_BOX.sub(r"\\boxed{", completion), timeout_seconds)
        return float(bool(found) and verify(gold, found, timeout_seconds=timeout_seconds))
    except (TimeoutException, RecursionError, MemoryError):
        return 0.0


def _parsed(text: str, timeout_seconds: int) -> list[Any]:
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
