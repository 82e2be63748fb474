"""Commands of a run file's first comment, which say how the files that it needs are made.

    #   python -m asyncrl.data.demo_task runs/demo     # runs/demo/model and runs/demo/prompts.jsonl

Tests: tests/unit/cli/test_head_comment.py.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Final

_COMMAND: Final = re.compile(r"# {2,}(\S.*?)\s*(?:\s#.*)?")
_WORD: Final = re.compile(r"[^\s:;,'\"]+")


def command_that_makes(run_file: Path, problem: str) -> str:
    """Return the command whose words name a path that ``problem`` names and that is not there, or a folder above it.

    "" if there is none.
    """
    try:
        missing = [word for word in _WORD.findall(problem) if "/" in word and not Path(word).exists()]
        head = itertools.takewhile(lambda line: line.startswith("#"), run_file.read_text("utf-8-sig").splitlines())
        commands = [found[1] for line in head if (found := _COMMAND.fullmatch(line))]
    except (OSError, ValueError):  # also of a path that is too long, or in a folder of someone else
        return ""
    return next((one for one in commands if _names_one(one, missing)), "")


def _names_one(command: str, paths: list[str]) -> bool:
    try:
        words = shlex.split(command)
    except ValueError:  # prose with an apostrophe
        return False
    return any(path == word or path.startswith(f"{word.rstrip('/')}/") for word in words for path in paths)
