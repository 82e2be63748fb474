"""The task of learning.py: sums of one-digit numbers, made by reasoning-gym, added up one number at a time.

    python -m benchmarks.gpu.reasoning benchmarks/gpu/tasks     makes the problems; needs reasoning-gym

SmolLM2-135M-Instruct that is asked for a sum chats, and guesses. Shown three sums worked line by line it takes that up
now and then, and a third of its answers are right. Sums of two to four numbers are a worse task: the answer to two
numbers is short and easy, and a policy that gives it to all sums is hard to get out of (docs/results/performance.md).
"""

from __future__ import annotations

import argparse
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.fleet import ask

Row = dict[str, Any]

TASKS: Final = Path(__file__).with_name("tasks")
TRAINED: Final = "sums.jsonl"
HELD_OUT: Final = "sums_held_out.jsonl"
"""One {"expression": "4 + 5 + 2", "answer": "11"} a line. None of the second file is in the first."""

SHOTS: Final = ("4 + 5 + 2", "7 + 6 + 1", "3 + 8 + 9")

ANSWER: Final = r"The answer is (-?\d+)"
"""The last such number is right or wrong; reasoning-gym compares the same way. The pattern is learning.toml's too."""

_EXAM_SECONDS: Final = 120.0

_DIFFICULTY: Final[Mapping[str, Any]] = {
    "min_digits": 1,
    "max_digits": 1,
    "operators": ("+",),
    "allow_parentheses": False,
    "allow_negation": False,
}


def messages(expression: str) -> list[dict[str, str]]:
    """The chat that asks for a sum, behind three that were answered.

    >>> messages("1 + 2")[-1]
    {'role': 'user', 'content': 'What is 1 + 2?'}
    """
    chat = []
    for shot in SHOTS:
        chat += [_message("user", f"What is {shot}?"), _message("assistant", worked(shot))]
    return [*chat, _message("user", f"What is {expression}?")]


def worked(expression: str) -> str:
    """The answer we hope for.

    >>> print(worked("4 + 5 + 2"))
    4 + 5 = 9
    9 + 2 = 11
    The answer is 11.
    """
    first, *others = map(int, expression.split(" + "))
    total, lines = first, []
    for number in others:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    return "\n".join([*lines, f"The answer is {total}."])


def write_prompts(path: Path, *, tasks: Path = TASKS) -> Path:
    """The run's data: chats and labels as JSONL, in the problems' order."""
    with path.open("w") as file:
        for problem in _problems(tasks / TRAINED):
            row = {"prompt": messages(problem["expression"]), "label": problem["answer"]}
            file.write(json.dumps(row) + "\n")
    return path


class Exam:
    """The held-out problems, each several times, as a server is asked."""

    def __init__(
        self, tokenizer: Any, *, max_new_tokens: int, tasks: Path = TASKS, problems: int = 256, samples: int = 4
    ) -> None:
        chosen = [problem for problem in _problems(tasks / HELD_OUT)[:problems] for _ in range(samples)]
        chats = [messages(problem["expression"]) for problem in chosen]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        self._prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._answers = [problem["answer"] for problem in chosen]
        self._max_new_tokens = max_new_tokens

    def take(self, url: str) -> Row:
        """What the weights that an SGLang server has now get right, at temperature 1. Raises OSError."""
        body = {
            "input_ids": self._prompts,
            "extra_key": uuid.uuid4().hex,  # its cache may hold keys of older weights
            "sampling_params": {"max_new_tokens": self._max_new_tokens, "temperature": 1.0},
        }
        texts = [reply["text"] for reply in ask(url, "/generate", body, seconds=_EXAM_SECONDS)]
        right = [is_right(text, answer) for text, answer in zip(texts, self._answers, strict=True)]
        version = str(ask(url, "/model_info")["weight_version"])
        return {"held_out": sum(right) / len(right), "answers": len(right), "version": version}


def is_right(text: str, answer: str) -> bool:
    """
    >>> is_right("The answer is 7. No. The answer is 11.", "11")
    True
    """
    return re.findall(ANSWER, text)[-1:] == [answer]


def _problems(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_problems(folder: Path, *, count: int, held_out: int, terms: tuple[int, int], seed: int) -> None:
    """What reasoning-gym draws: ``count`` problems, some of them twice, then ``held_out`` others."""
    import reasoning_gym  # type: ignore[import-untyped]  # for who makes the files, not for who trains on them

    difficulty = {"min_terms": terms[0], "max_terms": terms[1], **_DIFFICULTY}
    drawn = reasoning_gym.create_dataset("basic_arithmetic", size=2 * count, seed=seed, **difficulty)
    rows = [{"expression": problem["metadata"]["expression"], "answer": problem["answer"]} for problem in drawn]
    seen = {row["expression"] for row in rows[:count]}
    new = list({row["expression"]: row for row in rows[count:] if row["expression"] not in seen}.values())
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in ((TRAINED, rows[:count]), (HELD_OUT, new[:held_out])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in chosen))
        print(f"{folder / name}: {len(chosen)} problems")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.reasoning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--count", type=int, default=900, help="problems to train on (default 900)")
    parser.add_argument("--held-out", type=int, default=256, help="problems to test with (default 256)")
    parser.add_argument(
        "--terms", type=int, nargs=2, default=(3, 3), help="least and most numbers of a sum (default 3 3)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    write_problems(
        options.folder, count=options.count, held_out=options.held_out, terms=tuple(options.terms), seed=options.seed
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
