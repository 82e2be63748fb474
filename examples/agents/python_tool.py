"""An agent with a Python interpreter in the sandbox, as in ReTool (arXiv:2504.11536).

    python -m examples.agents.python_tool runs/python_tool [--tiny]     # problems that code helps to solve

The model writes code in a fence (```python), as often as it needs, and gets the output, or the value of the last line.
Then it writes <answer>...</answer>. A row's ``setup``, if it has one, runs before the code.
"""

from __future__ import annotations

import functools
import math
import os
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

from asyncrl.rewards.sandbox import Limits, Sandbox, open_sandbox
from examples.agents.chat import Chat, write

NAMES, NUMBERS = "BCDFGJKL", "01234567"
"""Variables and values of the tiny model's questions."""
SYSTEM = (
    "Solve the problem with Python. Code between ```python and ``` is run, and you get what it prints; run as much as "
    "you need. Then write <answer>the number</answer>."
)
MOST_TOKENS = int(os.environ.get("MOST_TOKENS", "1024"))
"""Longest turn of the model."""
MOST_TURNS = 4
FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SANDBOX = os.environ.get("SANDBOX", "bwrap")
LIMITS = Limits(seconds=5.0, memory_mib=256, processes=4)
RUN = """
import ast
names = {}
exec(open("setup.py").read(), names)
tree = ast.parse(open("code.py").read())
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "code", "exec"), names)
if last is not None:
    print(eval(compile(ast.Expression(last.value), "code", "eval"), names))
"""


@functools.cache
def sandbox() -> Sandbox:
    made = open_sandbox(SANDBOX, readable=[sys.base_prefix])
    made.check()
    return made


def run(code: str, *, setup: str = "") -> str:
    """Return the output of the code, or the last line of its error."""
    files = {"run.py": RUN.encode(), "setup.py": setup.encode(), "code.py": code.encode()}
    outcome = sandbox().run([os.path.realpath(sys.executable), "-I", "-S", "run.py"], limits=LIMITS, files=files)
    if outcome.stopped:
        return f"the code was stopped: {outcome.stopped}"
    shown = outcome.stdout or b"".join(outcome.stderr.splitlines()[-1:])
    return shown.decode(errors="replace").strip()[-2000:]


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.agents.python_tool:play"."""
    chat = Chat(endpoint, system=SYSTEM, max_tokens=MOST_TOKENS)
    parts = {"ran": 0.0, "seen": 0.0, "right": 0.0}
    said, role = task.prompt, "user"
    for _ in range(MOST_TURNS):
        turn = chat.ask(said, role=role)
        if answers := ANSWER.findall(turn):
            if answers[-1].strip() == task.label:
                parts["right"] = 0.5
            break
        if not (codes := FENCE.findall(turn)):
            said, role = "Write code between ```python and ```, or <answer>the number</answer>.", "user"
            continue
        said, role = run(codes[-1], setup=task.metadata.get("setup", "")) or "nothing was printed", "tool"
        if "Error" not in said:
            parts["ran"] = 0.1
        if task.label in said.split():
            parts["seen"] = 0.4
    return {"reward": sum(parts.values()), "reward_parts": parts}


def rows(*, count: int = 512, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield problems of number theory that are a line of Python and hours by hand."""
    draw = random.Random(seed)
    for _ in range(count):
        base, exponent, many = draw.randint(2, 99), draw.randint(40, 120), draw.randint(200, 5000)
        prompt, label = draw.choice(
            [
                (f"What is the sum of the decimal digits of {base}**{exponent}?", sum(map(int, str(base**exponent)))),
                (f"How many prime numbers are below {many}?", sum(map(is_prime, range(many)))),
                (f"How many positive divisors has {exponent}! (the factorial)?", divisors_of_factorial(exponent)),
                (f"What are the last three digits of the {many}th Fibonacci number, F(1) = F(2) = 1?", fibonacci(many)),
            ]
        )
        yield {"prompt": prompt, "label": str(label)}


def is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def divisors_of_factorial(number: int) -> int:
    """The exponent of a prime p in n! is n // p + n // p**2 + ... (Legendre)."""
    primes = filter(is_prime, range(number + 1))
    return math.prod(1 + sum(number // prime**power for power in range(1, number.bit_length())) for prime in primes)


def fibonacci(place: int) -> int:
    """Return the last three digits as a number."""
    one, following = 0, 1
    for _ in range(place):
        one, following = following, (one + following) % 1000
    return one


def tiny_rows(*, count: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield questions about variables whose values only the interpreter knows."""
    draw = random.Random(seed)
    for _ in range(count):
        numbers = {name: draw.choice(NUMBERS) for name in NAMES}
        name = draw.choice(NAMES)
        setup = "\n".join(f"{one} = {number}" for one, number in numbers.items())
        yield {"prompt": f"what is [{name}]", "label": numbers[name], "metadata": {"setup": setup}}


def phrases() -> list[str]:
    said = [f"```python\n{name}\n```" for name in NAMES] + [f"<answer>{number}</answer>" for number in NUMBERS]
    return [*(f"[{name}]" for name in NAMES), *NUMBERS, *said]


if __name__ == "__main__":
    write("python_tool", real=rows(), tiny=tiny_rows(), phrases=phrases())
