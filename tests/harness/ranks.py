"""Child ranks of a Megatron learner that fail or die, with the test in the place of the leader."""

from __future__ import annotations

import threading
from typing import Any


def follower_pid(backend: Any) -> int:
    return int(backend._followers._processes[0][1].pid)


class Ends:
    """Stands in for the end of the leader's process, which is the test's."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()
