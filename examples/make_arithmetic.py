"""Write sums made by reasoning-gym: prompts for examples/smollm2_arithmetic.toml, or with --worked for
examples/smollm2_sums.toml.

    python examples/make_arithmetic.py runs/arithmetic.jsonl
    python examples/make_arithmetic.py runs/sums.jsonl --worked --count 900 --held-out runs/sums_held_out.jsonl

A model of 135M parameters mostly chats when it is asked in words. When the prompt shows three sums, the model continues
with a number: 4 tokens instead of 40, right about four times in ten, so groups have differing rewards to learn from.
When the prompt shows three longer sums that are worked line by line (--worked), the model sometimes copies that form.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import reasoning_gym

SHOTS: Final = "12 + 3 = 15\n4 + 5 = 9\n20 + 31 = 51\n"
WORKED: Final = ("4 + 5 + 2", "7 + 6 + 1", "3 + 8 + 9")
MOST_TRIES: Final = 100
"""Problems drawn for each problem that is kept; there are only 1,000 sums of three digits."""


def shown(expression: str) -> str:
    return f"{SHOTS}{expression} ="


def chat(expression: str) -> list[dict[str, str]]:
    """Return messages that ask for a sum, after three answered examples."""
    messages = []
    for shot in WORKED:
        messages += [{"role": "user", "content": f"What is {shot}?"}, {"role": "assistant", "content": worked(shot)}]
    return [*messages, {"role": "user", "content": f"What is {expression}?"}]


def worked(expression: str) -> str:
    """Return a sum worked out one number at a time.

    >>> print(worked("4 + 5 + 2"))
    4 + 5 = 9
    9 + 2 = 11
    The answer is 11.
    """
    total, *others = map(int, expression.split(" + "))
    lines = []
    for number in others:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return "\n".join([*lines, f"The answer is {total}."])


def problems(*, is_worked: bool, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (expression, answer); worked problems are not repeated."""
    terms, digits = (3, 1) if is_worked else (2, 2)
    drawn = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=MOST_TRIES * 1000,
        seed=seed,
        min_terms=terms,
        max_terms=terms,
        min_digits=1,
        max_digits=digits,
        operators=("+",),
        allow_parentheses=False,
        allow_negation=False,
    )
    seen = set(WORKED)
    for problem in drawn:
        expression = problem["metadata"]["expression"]
        if not is_worked or expression not in seen:
            seen.add(expression)
            yield expression, problem["answer"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write arithmetic prompts as JSONL.")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--count", type=int, default=512, help="rows (default: 512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worked", action="store_true", help="chats with sums of three numbers, each worked out")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="write 64 further rows there; needs --worked")
    options = parser.parse_args()
    if options.held_out and not options.worked:
        parser.error("--held-out needs --worked: without it rows repeat, and some would be in both files")
    rows = problems(is_worked=options.worked, seed=options.seed)
    write(options.path, rows, options.count, is_worked=options.worked)
    if options.held_out:
        write(options.held_out, rows, 64, is_worked=True)


def write(path: Path, rows: Iterator[tuple[str, str]], count: int, *, is_worked: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        for _ in range(count):
            expression, answer = next(rows)
            row: dict[str, Any] = {"prompt": chat(expression) if is_worked else shown(expression), "label": answer}
            stream.write(json.dumps(row) + "\n")
    print(f"{path}: {count} prompts")


if __name__ == "__main__":
    main()
