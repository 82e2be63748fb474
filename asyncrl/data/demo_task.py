"""The demo's task: continue a count in octal. For a prompt such as "567", a good answer is "0123" and no more.

A model with random weights gets a reward of about 0.1, and a model that has learned the task 1.0. Every character is
rewarded separately, so learning can start from lucky guesses. ``python -m asyncrl.data.demo_task FOLDER`` writes the
model and the prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.rewards.port import Reward, Sample

DIGITS = "01234567"
ANSWER_LENGTH = 4
LONGEST_PROMPT = 4


def reward(sample: Sample) -> Reward:
    """Return the share of the answer's characters that follow the character before them in the count, in [0, 1].

    The share is over the answer's length or the label's, whichever is longer, so answers that are too short or too long
    lose reward.
    """
    counted = 0
    previous = sample.prompt[-1:]
    for character in sample.completion:
        counted += character == next_digit(previous)
        previous = character
    length = len(sample.completion)
    return Reward(
        value=counted / max(length, len(sample.label)),
        parts={"counted": float(counted), "right_length": float(length == len(sample.label))},
    )


def next_digit(digit: str) -> str:
    """Return the octal digit after ``digit``, without carry: 0 follows 7."""
    return DIGITS[(DIGITS.index(digit) + 1) % len(DIGITS)] if digit and digit in DIGITS else ""


def prompts() -> list[dict[str, str]]:
    """Return every start of a count of up to LONGEST_PROMPT digits, and its continuation."""
    return _counts(range(1, LONGEST_PROMPT + 1))


def held_out_prompts() -> list[dict[str, str]]:
    """Return every start that is one digit longer than the longest training prompt."""
    return _counts([LONGEST_PROMPT + 1])


def _counts(lengths: Iterable[int]) -> list[dict[str, str]]:
    rows = []
    for length in lengths:
        for first in range(len(DIGITS)):
            count = "".join(DIGITS[(first + i) % len(DIGITS)] for i in range(length + ANSWER_LENGTH))
            rows.append({"prompt": count[:length], "label": count[length:]})
    return rows


def write(folder: Path, *, seed: int = 0, architecture: str = "qwen3", initializer_range: float = 0.05) -> None:
    """Write prompts.jsonl, held_out.jsonl and model, a tiny model with random weights, to ``folder``.

    initializer_range  standard deviation of the weights
    """
    from asyncrl.data.tiny_model import make_tiny_model  # imports torch, which workers do not need for ``reward``

    make_tiny_model(
        folder / "model",
        architecture=architecture,
        seed=seed,
        characters=DIGITS,
        max_positions=64,
        initializer_range=initializer_range,
    )
    for name, rows in (("prompts", prompts()), ("held_out", held_out_prompts())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write to the folder that the command line names; None: this process's. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.data.demo_task", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model and the prompts are written")
    write(parser.parse_args(arguments).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
