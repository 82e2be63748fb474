"""An agent with a Python interpreter in the sandbox, as in ReTool (arXiv:2504.11536).

    python -m examples.agents.python_tool runs/python_tool     # a tiny model and its questions

A turn that begins with ">" is code. It runs after the row's ``setup``, and the model gets its output, or the value of
its last line. Any other turn is the answer. Rows without ``setup`` are problems that code helps to solve.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.rewards.sandbox import Limits, Sandbox, open_sandbox
from examples.agents.chat import Chat, write

NAMES, NUMBERS = "BCDFGJKL", "01234567"
SYSTEM = "to run code in python, begin with >; then answer with the number alone."
MOST_TURNS = 2
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
    chat = Chat(endpoint, system=SYSTEM, max_tokens=2)
    parts = {"ran": 0.0, "seen": 0.0, "right": 0.0}
    said = chat.ask(task.prompt)
    for _ in range(MOST_TURNS - 1):
        if not said.startswith(">"):
            break
        printed = run(said[1:].strip(), setup=task.metadata.get("setup", ""))
        if printed and "Error" not in printed:
            parts["ran"] = 0.1
        if printed == task.label:
            parts["seen"] = 0.4
        said = chat.ask(printed or "nothing was printed", role="tool")
    if said.strip() == task.label:
        parts["right"] = 0.5
    return {"reward": sum(parts.values()), "reward_parts": parts}


def rows(*, count: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield questions about names whose numbers only the interpreter knows."""
    draw = random.Random(seed)
    for _ in range(count):
        numbers = {name: draw.choice(NUMBERS) for name in NAMES}
        name = draw.choice(NAMES)
        setup = "\n".join(f"{one} = {number}" for one, number in numbers.items())
        yield {"prompt": f"what is {name}", "label": numbers[name], "metadata": {"setup": setup}}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.agents.python_tool FOLDER")
    write(Path(sys.argv[1]), rows(), characters=NAMES + NUMBERS + ">")
