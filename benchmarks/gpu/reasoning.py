"""The tasks of learning.py: arithmetic from reasoning-gym, worked one operation at a time.

    python -m benchmarks.gpu.reasoning benchmarks/gpu/tasks/sums --tasks sums          makes the problems; needs
    python -m benchmarks.gpu.reasoning benchmarks/gpu/tasks/mixed                      reasoning-gym

If asked for a sum, SmolLM2-135M-Instruct chats and guesses. With three examples worked line by line in its prompt, it
sometimes follows them, and a third of its answers are right. Sums of two to four numbers are a worse task: the answer
to two numbers is short and easy, and a policy that gives such answers to all sums hardly recovers
(docs/results/performance.md).

Mixed has a third of the problems each: sums of three one-digit numbers, and sums and differences of two and of three
two-digit numbers.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.fleet import ask

Row = dict[str, Any]

TASKS: Final = Path(__file__).with_name("tasks")
TRAINED: Final = "trained.jsonl"
HELD_OUT: Final = "held_out.jsonl"
"""One {"task": "sums", "expression": "4 + 5 + 2", "answer": "11"} per line. The two files have no problem in common."""

ANSWER: Final = r"The answer is (-?\d+)"
"""The last match is the answer; reasoning-gym compares the same way. learning.toml has the same pattern."""

_EXAM_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    dataset  data set of reasoning-gym, with its settings
    shots    expressions that the prompt shows with their worked answers
    """

    dataset: str
    settings: Mapping[str, Any]
    shots: tuple[str, str, str]


KINDS: Final[Mapping[str, Task]] = {
    "sums": Task(
        dataset="basic_arithmetic",
        settings={
            "min_terms": 3,
            "max_terms": 3,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ("+",),
            "allow_parentheses": False,
            "allow_negation": False,
        },
        shots=("4 + 5 + 2", "7 + 6 + 1", "3 + 8 + 9"),
    ),
    "differences": Task(
        dataset="chain_sum",
        settings={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        shots=("42 - 25", "57 + 36", "31 - 68"),
    ),
    "chains": Task(
        dataset="chain_sum",
        settings={"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2},
        shots=("42 - 25 + 31", "57 + 36 + 80", "13 + 24 - 61"),
    ),
}
_OPERATIONS: Final = {"+": operator.add, "-": operator.sub}


def messages(task: str, expression: str) -> list[dict[str, str]]:
    """Return the chat that asks for an expression, after three answered ones.

    >>> messages("sums", "1 + 2")[-1]
    {'role': 'user', 'content': 'What is 1 + 2?'}
    """
    chat = []
    for shot in KINDS[task].shots:
        chat += [_message("user", f"What is {shot}?"), _message("assistant", worked(shot))]
    return [*chat, _message("user", f"What is {expression}?")]


def worked(expression: str) -> str:
    """Return the ideal answer, with its operations in order.

    >>> print(worked("4 + 5 - 2"))
    4 + 5 = 9
    9 - 2 = 7
    The answer is 7.
    """
    first, *others = expression.split()
    total, lines = int(first), []
    for sign, number in zip(others[::2], others[1::2], strict=True):
        result = _OPERATIONS[sign](total, int(number))
        lines.append(f"{total} {sign} {number} = {result}")
        total = result
    return "\n".join([*lines, f"The answer is {total}."])


def write_prompts(path: Path, *, tasks: Path) -> Path:
    """Write the run's data: chats and labels as JSONL, in the order of the problems."""
    with path.open("w") as file:
        for problem in _problems(tasks / TRAINED):
            row = {"prompt": messages(problem["task"], problem["expression"]), "label": problem["answer"]}
            file.write(json.dumps(row) + "\n")
    return path


def write_exam(path: Path, *, tasks: Path, problems: int) -> Path:
    """Write held-out problems for [[evaluation.datasets]]: chats, labels, and the task of each."""
    with path.open("w") as file:
        for problem in _problems(tasks / HELD_OUT)[:problems]:
            chat = messages(problem["task"], problem["expression"])
            file.write(json.dumps({"prompt": chat, "label": problem["answer"], "task": problem["task"]}) + "\n")
    return path


class Exam:
    """The held-out problems as requests to a server, each several times."""

    def __init__(
        self, tokenizer: Any, *, max_new_tokens: int, tasks: Path, problems: int = 256, samples: int = 4
    ) -> None:
        chosen = [problem for problem in _problems(tasks / HELD_OUT)[:problems] for _ in range(samples)]
        chats = [messages(problem["task"], problem["expression"]) for problem in chosen]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        self._prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        self._answers = [problem["answer"] for problem in chosen]
        self._tasks = [problem["task"] for problem in chosen]
        self._max_new_tokens = max_new_tokens

    def take(self, url: str) -> Row:
        """Examine the current weights of an SGLang server at temperature 1, and return the result. Raises OSError."""
        body = {
            "input_ids": self._prompts,
            "extra_key": uuid.uuid4().hex,  # its cache may hold KV of older weights
            "sampling_params": {"max_new_tokens": self._max_new_tokens, "temperature": 1.0},
        }
        texts = [reply["text"] for reply in ask(url, "/generate", body, seconds=_EXAM_SECONDS)]
        right = [is_right(text, answer) for text, answer in zip(texts, self._answers, strict=True)]
        version = str(ask(url, "/model_info")["weight_version"])
        of_task = {
            task: statistics.fmean(one for one, its in zip(right, self._tasks, strict=True) if its == task)
            for task in dict.fromkeys(self._tasks)
        }
        return {"held_out": statistics.fmean(right), "of_task": of_task, "answers": len(right), "version": version}


def is_right(text: str, answer: str) -> bool:
    """
    >>> is_right("The answer is 7. No. The answer is 11.", "11")
    True
    """
    return re.findall(ANSWER, text)[-1:] == [answer]


def _problems(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_problems(folder: Path, *, tasks: Sequence[str], count: int, held_out: int, seed: int) -> None:
    """Write problems drawn by reasoning-gym: ``count``, some of them twice, then ``held_out`` others; tasks in turn."""
    trained = [drawn(task, count=count, held_out=held_out, seed=seed) for task in tasks]
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, which in ((TRAINED, count, 0), (HELD_OUT, held_out, 1)):
        mixed = [row for rows in zip(*(both[which] for both in trained), strict=False) for row in rows][:size]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in mixed))
        print(f"{folder / name}: {len(mixed)} problems")


def drawn(task: str, *, count: int, held_out: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Draw ``count`` problems of a task, and up to ``held_out`` new ones that prompts do not show."""
    import reasoning_gym  # only to make the files; training does not need it

    kind = KINDS[task]
    problems = reasoning_gym.create_dataset(kind.dataset, size=2 * count, seed=seed, **kind.settings)
    rows = [{"task": task, "expression": one["metadata"]["expression"], "answer": one["answer"]} for one in problems]
    seen = {row["expression"] for row in rows[:count]} | set(kind.shots)
    new = list({row["expression"]: row for row in rows[count:] if row["expression"] not in seen}.values())
    return rows[:count], new[:held_out]


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
    parser.add_argument("--tasks", nargs="+", choices=KINDS, default=list(KINDS), help="(default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    write_problems(
        options.folder, tasks=options.tasks, count=options.count, held_out=options.held_out, seed=options.seed
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
