"""Ranks of a Megatron learner that fail or die, with the test in the place of rank 0."""

from __future__ import annotations

import threading
from typing import Any


def child_pid(backend: Any) -> int:
    return int(backend._children._processes[1].pid)


class Ends:
    """Stands in for the end of rank 0's process, which is the test's."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()
