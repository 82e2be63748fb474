"""A sink that may be slow, or hang, gets its calls in a thread of its own: training does not wait for it.

What it is too slow for is left out, counted (metrics/left_out) and said. What it raises ends the run all the same: a
run whose numbers are lost is not worth its GPUs. At the end it has CLOSE_SECONDS for what is left, and then nobody
waits for it any more.

Tests: tests/unit/metrics/test_background.py.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from asyncrl.errors import disk_problem
from asyncrl.metrics.ports import ShowsSamples, Sink, TakesAlarms
from asyncrl.policies.batching.batch import Metric
from asyncrl.policies.groups.sample import GroupSample

MOST_WAITING: Final = 64
"""Calls: rows, lists of samples, alarms."""
CLOSE_SECONDS: Final = 10.0
"""Less than an actor has to stop in (supervisor.py)."""
PAUSE_SECONDS: Final = 1.0
"""Between two tries to write to a disk that has no room: nobody announces that there is some again."""

log = logging.getLogger("asyncrl.learner")


class BackgroundSink:
    """name: of the sink, for a person"""

    def __init__(self, sink: Sink, *, name: str, close_seconds: float = CLOSE_SECONDS) -> None:
        self._sink = sink
        self._name = name
        self._close_seconds = close_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._error: Exception | None = None  # until somebody was told
        self._has_failed = False
        self.num_left_out = 0
        """Calls that it was too slow for."""
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Raises what the sink has raised since the last call, as the others do."""
        self._put(functools.partial(self._sink.write, step, metrics))

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        if isinstance(self._sink, ShowsSamples):
            self._put(functools.partial(self._sink.write_samples, step, samples))

    def alarm(self, step: int, name: str, text: str) -> None:
        if isinstance(self._sink, TakesAlarms):
            self._put(functools.partial(self._sink.alarm, step, name, text))

    def close(self) -> None:
        """Blocks for ``close_seconds`` at most."""
        with self._changed:
            self._is_closing.set()
            self._changed.notify()
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            log.error(
                "metrics: %s is not done after %g s; it did not get %d of the last rows, and is not waited for",
                self._name,
                self._close_seconds,
                len(self._calls),
            )
        elif self.num_left_out:
            log.warning("metrics: %s did not get %d rows in all", self._name, self.num_left_out)
        self._raise()

    def _put(self, call: Callable[[], None]) -> None:
        self._raise()
        if self._has_failed:
            return
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

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        """consumes: calls    waits for: the next    woken by: the learner. Ends when it is closed and all is done."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._is_closing.is_set())
                call = self._calls.popleft() if self._calls else None
            if call is None:
                self._call(self._sink.close)
                return
            if not self._has_failed:
                self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        is_said = False
        while True:
            try:
                return call()
            except Exception as error:  # whatever a user's class or a service's client raises
                if disk_problem(error) is None or self._is_closing.is_set():
                    self._error, self._has_failed = error, True
                    return None
                if not is_said:
                    log.error("metrics: %s cannot write: %s; it tries again", self._name, error)
                is_said = True
            self._is_closing.wait(PAUSE_SECONDS)
