"""A coding agent that repairs one file of a small repository, in the sandbox, until the repository's tests pass.

    python -m examples.agents.coding runs/coding [--tiny]     # the repositories below, or some of one digit

Each turn of the model is the new text of the file, with or without a fence. The tests run on it, and the model gets
their output. A row is one repository: {"prompt", "metadata": {"files": {name: text}, "edit": name}}. The reward is 1
when its ``tests.py`` passes.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from asyncrl.rewards.sandbox import Limits, Sandbox, open_sandbox
from examples.agents.chat import Chat, write

MOST_TURNS = 3
MOST_TOKENS = int(os.environ.get("MOST_TOKENS", "1024"))
"""Longest turn of the model."""
SANDBOX = os.environ.get("SANDBOX", "bwrap")
LIMITS = Limits(seconds=10.0, memory_mib=512, processes=8)
FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
BROKEN = {
    "leap.py": (
        "def is_leap(year):\n    return year % 4 == 0\n",
        "from leap import is_leap\n"
        "assert is_leap(2024) and is_leap(2000), 'every 4th and every 400th year is a leap year'\n"
        "assert not is_leap(1900), '1900 is no leap year'\n",
    ),
    "spans.py": (
        "def merged(spans):\n    made = []\n    for start, end in spans:\n"
        "        if made and start <= made[-1][1]:\n            made[-1] = (made[-1][0], end)\n"
        "        else:\n            made.append((start, end))\n    return made\n",
        "from spans import merged\n"
        "assert merged([(1, 3), (2, 5)]) == [(1, 5)]\n"
        "assert merged([(1, 9), (2, 5)]) == [(1, 9)], 'a span inside another'\n"
        "assert merged([(4, 5), (1, 2)]) == [(1, 2), (4, 5)], 'spans in any order'\n",
    ),
    "slug.py": (
        "def slug(title):\n    return title.lower().replace(' ', '-')\n",
        "from slug import slug\n"
        "assert slug('A day') == 'a-day'\n"
        "assert slug('  So,  what? ') == 'so-what', slug('  So,  what? ')\n",
    ),
    "cache.py": (
        "class Cache:\n    def __init__(self, size):\n        self.size, self.kept = size, {}\n\n"
        "    def get(self, key):\n        return self.kept.get(key)\n\n"
        "    def put(self, key, value):\n        if len(self.kept) == self.size:\n"
        "            self.kept.pop(next(iter(self.kept)))\n        self.kept[key] = value\n",
        "from cache import Cache\n"
        "cache = Cache(2)\ncache.put('a', 1)\ncache.put('b', 2)\ncache.put('a', 3)\n"
        "assert cache.get('b') == 2, 'a key that is there takes no other one\\'s place'\n"
        "cache.get('a')\ncache.get('b')\ncache.put('c', 4)\n"
        "assert cache.get('a') is None and cache.get('b') == 2, 'the least recently used key goes'\n",
    ),
    "pages.py": (
        "def pages(items, size):\n    return [items[n * size : (n + 1) * size] for n in range(len(items) // size)]\n",
        "from pages import pages\n"
        "assert pages([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]\n"
        "assert pages([1, 2, 3], 2) == [[1, 2], [3]], 'the last page may be short'\n"
        "try:\n    pages([1], 0)\nexcept ValueError:\n    pass\nelse:\n"
        "    raise AssertionError('a size of 0 is a ValueError')\n",
    ),
    "roman.py": (
        "VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100, 'D': 500, 'M': 1000}\n\n\n"
        "def number(roman):\n    return sum(VALUES[letter] for letter in roman)\n",
        "from roman import number\n"
        "assert number('XVII') == 17\n"
        "assert number('MCMXCIV') == 1994, f\"MCMXCIV is 1994, not {number('MCMXCIV')}\"\n",
    ),
}


@functools.cache
def sandbox() -> Sandbox:
    made = open_sandbox(SANDBOX, readable=[sys.base_prefix])
    made.check()
    return made


def run_tests(files: dict[str, str]) -> tuple[bool, str]:
    """Return whether the tests pass, and the end of their output."""
    command = [os.path.realpath(sys.executable), "-S", "-B", "tests.py"]
    outcome = sandbox().run(command, limits=LIMITS, files={name: text.encode() for name, text in files.items()})
    said = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
    return not outcome.code and not outcome.stopped, outcome.stopped or "\n".join(said.splitlines()[-8:])[-2000:]


def play(task: Any, endpoint: Any) -> dict[str, Any]:
    """The harness: rollout.options.harness = "examples.agents.coding:play"."""
    files, edited = dict(task.metadata["files"]), task.metadata["edit"]
    chat = Chat(endpoint, max_tokens=MOST_TOKENS)
    said, role = task.prompt, "user"
    for turn in range(MOST_TURNS):
        answer = chat.ask(said, role=role)
        fenced = FENCE.search(answer)
        files[edited] = fenced[1] if fenced else answer
        passed, said = run_tests(files)
        role = "tool"
        if passed:
            return {"reward": 1.0, "metrics": {"turns": turn + 1}}
    return {"reward": 0.0, "metrics": {"turns": MOST_TURNS}}


def rows() -> Iterator[dict[str, Any]]:
    for name, (text, tests) in BROKEN.items():
        prompt = f"The tests fail. Answer with the whole new text of {name} in a fence, and nothing else.\n\n"
        prompt += f"{name}:\n```python\n{text}```\n\ntests.py:\n```python\n{tests}```"
        yield {"prompt": prompt, "metadata": {"files": {name: text, "tests.py": tests}, "edit": name}}


def tiny_rows() -> Iterator[dict[str, Any]]:
    """Yield repositories with a file of one digit, which the tests' output names, so a tiny model can repair it."""
    for number in range(8):
        for room in "BCDF":
            tests = f"room = open('size.txt').read().strip()\nassert room == '{number}', 'want {number}'\n"
            files = {"size.txt": "", "tests.py": tests}
            yield {"prompt": f"mend the size of room {room}", "metadata": {"files": files, "edit": "size.txt"}}


if __name__ == "__main__":
    write("coding", real=rows(), tiny=tiny_rows(), phrases=[*"BCDF", *"01234567"])
