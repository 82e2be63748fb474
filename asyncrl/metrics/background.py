"""Calls a sink that may be slow, hang or fail from a separate thread, so that training neither waits nor ends for it.

Calls that fail, or for which the sink is too slow, are left out, counted (metrics/left_out) and logged: metrics.jsonl
has every row. At the end, the sink has CLOSE_SECONDS to finish; then the process no longer waits for it.

Tests: tests/unit/metrics/test_background.py.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from asyncrl.errors import AsyncRLError, disk_problem
from asyncrl.metrics.port import ShowsSamples, Sink, TakesAlarms
from asyncrl.policies.groups.sample import GroupSample
from asyncrl.policies.metric import Metric

MOST_WAITING: Final = 64
"""Maximum number of waiting calls: rows, lists of samples, alarms."""
CLOSE_SECONDS: Final = 10.0
"""Less than the time that an actor has to stop (supervisor.py)."""
PAUSE_SECONDS: Final = 1.0
"""Seconds between attempts to write to a full disk; nothing signals free space."""

log = logging.getLogger("asyncrl.learner")


class BackgroundSink:
    """Runs a sink in a thread. ``name`` of the sink appears in messages."""

    def __init__(self, sink: Sink, *, name: str, close_seconds: float = CLOSE_SECONDS) -> None:
        self._sink = sink
        self._name = name
        self._close_seconds = close_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._has_failed = False
        self.num_left_out = 0
        """Calls that were left out because the sink was too slow or failed."""
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Queue a row."""
        self._put(functools.partial(self._sink.write, step, metrics))

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        if isinstance(self._sink, ShowsSamples):
            self._put(functools.partial(self._sink.write_samples, step, samples))

    def alarm(self, step: int, name: str, text: str) -> None:
        if isinstance(self._sink, TakesAlarms):
            self._put(functools.partial(self._sink.alarm, step, name, text))

    def close(self) -> None:
        """Finish the queued calls and close the sink; blocks for at most ``close_seconds``."""
        with self._changed:
            self._is_closing.set()
            self._changed.notify()
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            log.error(
                "metrics: %s did not finish within %g s; the last %d rows are missing there",
                self._name,
                self._close_seconds,
                len(self._calls),
            )
        elif self.num_left_out:
            log.warning("metrics: %s did not get %d rows in all", self._name, self.num_left_out)

    def _put(self, call: Callable[[], None]) -> None:
        with self._changed:
            if len(self._calls) < MOST_WAITING:
                self._calls.append(call)
                self._changed.notify()
                return
        self.num_left_out += 1
        if self.num_left_out == 1:
            log.warning(
                "metrics: %s is slower than training: %d rows wait for it, and others are left out (metrics/left_out)",
                self._name,
                MOST_WAITING,
            )

    def _work(self) -> None:
        """consumes: calls    waits for: the next call    woken by: the learner. Ends when the sink is closed and all
        calls are done."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._is_closing.is_set())
                call = self._calls.popleft() if self._calls else None
            if call is None:
                self._call(self._sink.close)
                return
            self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        is_said = False
        while True:
            try:
                return call()
            except Exception as error:  # a user's class or a service's client may raise anything
                if disk_problem(error) is None or self._is_closing.is_set():
                    self._leave_out(error)
                    return None
                if not is_said:
                    log.error("metrics: %s cannot write: %s; it tries again", self._name, error)
                is_said = True
            self._is_closing.wait(PAUSE_SECONDS)

    def _leave_out(self, error: Exception) -> None:
        self.num_left_out += 1
        if not self._has_failed:
            text = " ".join(str(error).split())
            log.error(
                "metrics: %s failed: %s; the run goes on, metrics.jsonl has every row, and metrics/left_out counts "
                "what %s has not",
                self._name,
                text if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {text}",
                self._name,
            )
        self._has_failed = True
