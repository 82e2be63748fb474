"""The tasks: three that a tiny model learns from random weights, and three for a real one.

  count   "+345" -> "6701": continue a count in octal (asyncrl/data/demo_task.py)
  mixed   a third each of counts up ("+"), counts down ("-") and repetitions ("="), told apart by the first character
  search  an agent's task of several turns: find a digit of 0 to 7. After each guess the environment says whether the
          digit is larger (">") or smaller ("<"); the third guess is the last. Binary search finds seven of eight

Held-out prompts of the first two are one digit longer than any that is trained.

A real model has the sums and the mixed arithmetic of benchmarks/gpu/tasks, and guess, an agent's task of several turns:

  guess   find a number among fifteen. After each guess the user says "higher", "lower" or "right"; the fourth guess is
          the last. Binary search finds all of them. No held-out number was trained in its interval
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu import reasoning

CHARACTERS: Final = "01234567+-=?<>"
_STEPS: Final = {"+": 1, "-": -1, "=": 0}
_KINDS: Final = {"+": "up", "-": "down", "=": "same"}
_LONGEST: Final = 3
_ANSWER: Final = 4
_GUESSES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """kind: of problems that are counted apart"""

    prompt: str
    label: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    turn_tokens  most tokens of one turn
    reward       of (problem, what the model said in each turn)
    reply        what the environment says next; "" ends the rollout
    chats        whether a prompt is JSON of chat messages
    """

    name: str
    trained: Sequence[Problem]
    held_out: Sequence[Problem]
    turn_tokens: int
    reward: Callable[[Problem, Sequence[str]], float]
    reply: Callable[[Problem, Sequence[str]], str] = lambda problem, said: ""
    chats: bool = False


# -- counts ------------------------------------------------------------------------------------------------------------


def share_counted(problem: Problem, said: Sequence[str]) -> float:
    """Return the share of characters that continue the count from the character before; too many or too few cost.

    >>> share_counted(Problem(prompt="+345", label="6701", kind="up"), ["67012"])
    0.8
    >>> share_counted(Problem(prompt="-345", label="4321", kind="down"), ["43"])
    0.5
    """
    before, counted, step = problem.prompt[-1], 0, _STEPS[problem.prompt[0]]
    for character in said[-1]:
        counted += before.isdigit() and character == str((int(before) + step) % 8)
        before = character
    return counted / max(len(said[-1]), len(problem.label))


def _counts(name: str, signs: str) -> Task:
    def problems(lengths: Sequence[int]) -> list[Problem]:
        made = []
        for length in lengths:
            for first in range(8):
                for sign in signs:
                    digits = [str((first + i * _STEPS[sign]) % 8) for i in range(length + _ANSWER)]
                    prompt, label = "".join([sign, *digits[:length]]), "".join(digits[length:])
                    made.append(Problem(prompt=prompt, label=label, kind=_KINDS[sign]))
        return made

    return Task(
        name=name,
        trained=problems(range(1, _LONGEST + 1)),
        held_out=problems([_LONGEST + 1]),
        turn_tokens=2 * _ANSWER,
        reward=share_counted,
    )


# -- several turns -----------------------------------------------------------------------------------------------------


def hint(problem: Problem, said: Sequence[str]) -> str:
    """Return whether the digit is larger or smaller than the last guess; "" once it is found or the guesses are over.

    >>> hint(Problem(prompt="?", label="6", kind="search"), ["3"])
    '>'
    """
    if said[-1] == problem.label or len(said) == _GUESSES:
        return ""
    return "?" if not said[-1].isdigit() else ">" if problem.label > said[-1] else "<"


def _is_right(problem: Problem, said: Sequence[str]) -> float:
    return float(said[-1] == problem.label)


def _search() -> Task:
    problems = [Problem(prompt="?", label=str(n), kind="search") for n in range(8)]
    return Task(name="search", trained=problems, held_out=problems, turn_tokens=1, reward=_is_right, reply=hint)


# -- of a real model ---------------------------------------------------------------------------------------------------


def _worked(name: str) -> Task:
    def problems(file: str) -> list[Problem]:
        rows = [json.loads(line) for line in (reasoning.TASKS / name / file).read_text().splitlines()]
        return [
            Problem(
                prompt=json.dumps(reasoning.messages(row["task"], row["expression"])),
                label=row["answer"],
                kind=row["task"],
            )
            for row in rows
        ]

    return Task(
        name=name,
        trained=problems(reasoning.TRAINED),
        held_out=problems(reasoning.HELD_OUT),
        turn_tokens=48,
        reward=lambda problem, said: float(reasoning.is_right(said[-1], problem.label)),
        chats=True,
    )


_WIDTH: Final = 15
_TURNS: Final = 4
_SHOTS: Final = ((20, "23", ("27", "23")), (61, "74", ("68", "72", "74")), (38, "46", ("45", "49", "47", "46")))
"""First number of an interval, the number, and the guesses of a binary search."""


def last_number(said: Sequence[str]) -> str:
    """Return the number of the last turn, "" if it has none.

    >>> last_number(["45", "I guess 49."])
    '49'
    """
    found = re.search(r"\d+", said[-1])
    return found.group() if found else ""


def judge(problem: Problem, said: Sequence[str]) -> str:
    """Return what the user says to the last guess.

    >>> judge(Problem(prompt="", label="46", kind="guess"), ["45"])
    'higher'
    """
    number = last_number(said)
    if not number:
        return "say a number"
    return "right" if number == problem.label else "higher" if int(number) < int(problem.label) else "lower"


def _next_turn(problem: Problem, said: Sequence[str]) -> str:
    """Return the user's turn in the chat format of SmolLM2, up to where the model speaks; "" at the end."""
    answer = judge(problem, said)
    if answer == "right" or len(said) == _TURNS:
        return ""
    return f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"


def _game(first: int) -> dict[str, str]:
    content = f"I think of a number from {first} to {first + _WIDTH - 1}. Which one?"
    return {"role": "user", "content": content}


def _guess() -> Task:
    shots = []
    for first, label, guesses in _SHOTS:
        shots.append(_game(first))
        problem = Problem(prompt="", label=label, kind="guess")
        for guess in guesses:
            shots.append({"role": "assistant", "content": guess})
            shots.append({"role": "user", "content": judge(problem, [guess])})
        shots.pop()
    games = [(first, first + at) for first in range(10, 85) for at in range(_WIDTH)]
    random.Random(0).shuffle(games)
    problems = [
        Problem(prompt=json.dumps([*shots, _game(first)]), label=str(number), kind="guess") for first, number in games
    ]
    return Task(
        name="guess",
        trained=problems[256:],
        held_out=problems[:256],
        turn_tokens=8,
        reward=lambda problem, said: float(judge(problem, said) == "right"),
        reply=_next_turn,
        chats=True,
    )


TINY: Final[Mapping[str, Callable[[], Task]]] = {
    "count": lambda: _counts("count", "+"),
    "mixed": lambda: _counts("mixed", "+-="),
    "search": _search,
}
REAL: Final[Mapping[str, Callable[[], Task]]] = {
    "sums": partial(_worked, "sums"),
    "mixed": partial(_worked, "mixed"),
    "guess": _guess,
}


def encode(task: Task, problem: Problem, tokenizer: Any) -> list[int]:
    text = problem.prompt
    if task.chats:
        text = tokenizer.apply_chat_template(json.loads(text), tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def make_model(folder: Path, *, seed: int) -> Path:
    """Write a tiny model with random weights for the tasks in TINY."""
    from asyncrl.data.tiny_model import make_tiny_model

    return make_tiny_model(
        folder,
        architecture="llama",
        num_layers=1,
        seed=seed,
        characters=CHARACTERS,
        max_positions=64,
        initializer_range=0.05,
    )
