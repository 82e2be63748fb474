"""The judge process for mathematics: a JSON line [seconds, [label, completion]] in, {"reward": 1.0} out.

math-verify limits its time with signals. Signals work only in a process's main thread, so judging has its own process.
It ends when its standard input ends.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from typing import Any

from asyncrl.rewards.answers import bare, last_boxed
from asyncrl.rewards.time_limit import within


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
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    boxed = last_boxed(completion)
    if bare(completion if boxed is None else boxed) == bare(label) != "":
        return 1.0
    targets = (LatexExtractionConfig(), ExprExtractionConfig())
    gold = parse(label, targets, parsing_timeout=timeout_seconds) or parse(
        f"${label}$", targets, parsing_timeout=timeout_seconds
    )
    if not gold:
        raise LabelError(f"the label {label[:60]!r} holds no number or formula")
    try:
        found = parse(completion, targets, parsing_timeout=timeout_seconds)
        return float(bool(found) and verify(gold, found, timeout_seconds=timeout_seconds))
    except (TimeoutException, RecursionError, MemoryError):
        return 0.0


if __name__ == "__main__":
    main()
