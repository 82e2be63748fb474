"""Limit the time of calls, in a judge process's main thread (judge_pool.py).

The timer counts CPU time, so that a busy machine makes no answer wrong. It is not the timer of ``signal.alarm``, which
math-verify uses.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

T = TypeVar("T")

_AGAIN_SECONDS: Final = 0.1
"""Interval of further signals: Python ignores an exception that is raised in a destructor."""


class OutOfTime(BaseException):
    """The time is used up. Not an Exception, because libraries handle those."""


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of ``call``; None if it does not end within ``seconds`` of CPU time."""
    signal.signal(signal.SIGPROF, _out_of_time)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except OutOfTime:
        return None


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
