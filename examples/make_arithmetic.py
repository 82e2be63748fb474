"""Writes the prompts of examples/smollm2_arithmetic.toml: sums of two digits, made by reasoning-gym.

    python examples/make_arithmetic.py runs/arithmetic.jsonl

A model of 135M parameters that is asked in words mostly chats. Shown three sums, it goes on with the number: 4 tokens
instead of 40, right about four times in ten, which is where a group of samples has something to learn from.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import reasoning_gym

SHOTS = "12 + 3 = 15\n4 + 5 = 9\n20 + 31 = 51\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write arithmetic prompts as JSONL.")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--count", type=int, default=512, help="rows (default: 512)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    problems = reasoning_gym.create_dataset(
        "basic_arithmetic",
        size=options.count,
        seed=options.seed,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=2,
        operators=("+",),
        allow_parentheses=False,
        allow_negation=False,
    )
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with options.path.open("w") as stream:
        for problem in problems:
            row = {"prompt": f"{SHOTS}{problem['metadata']['expression']} =", "label": problem["answer"]}
            stream.write(json.dumps(row) + "\n")
    print(f"{options.path}: {options.count} prompts")


if __name__ == "__main__":
    main()
