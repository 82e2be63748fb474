"""`asyncrl ARGUMENTS` whose measurements (planning/plan.py) are forks of it, which have imported what they need.

What a new Python would be sent is pickled all the same.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from asyncrl.cli import main as cli


class _Measurement(ForkProcess):
    def __init__(self, *, target: Any, args: Any, kwargs: Any) -> None:
        pickle.dumps((target, args[1:], kwargs))  # the first is the pipe's end
        super().__init__(target=target, args=args, kwargs=kwargs)


class _Forks(ForkContext):
    Process = _Measurement


def main(arguments: Sequence[str]) -> int:
    fork = _Forks()  # this process has one thread, and no GPU
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    return cli.main(arguments)
