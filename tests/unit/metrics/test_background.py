"""A sink that is slow, hangs or raises: training does not wait, and every loss is reported."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.metrics.background import MOST_WAITING, BackgroundSink
from asyncrl.metrics.port import ShowsSamples, TakesAlarms


class Slow:
    """A sink whose first call waits for ``gate``."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.is_closed = False

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.begun.set()
        assert self.gate.wait(120)
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_background_sink_writes_all_rows_in_order() -> None:
    slow = Slow()
    sink = BackgroundSink(slow, name="slow", close_seconds=120)
    for step in range(5):
        sink.write(step, {})
    slow.gate.set()
    sink.close()
    assert slow.steps == [0, 1, 2, 3, 4] and slow.is_closed


def test_rows_for_a_slow_sink_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    sink = BackgroundSink(slow, name="slow", close_seconds=120)
    sink.write(0, {})
    assert slow.begun.wait(120)
    for step in range(1, MOST_WAITING + 4):
        sink.write(step, {})
    assert sink.num_left_out == 3
    assert caplog.text.count("slow is slower than training") == 1
    slow.gate.set()
    sink.close()
    assert slow.steps == list(range(MOST_WAITING + 1))
    assert "slow did not get 3 rows in all" in caplog.text


def test_closing_does_not_wait_for_a_hanging_sink(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Slow()
    sink = BackgroundSink(hanging, name="hanging", close_seconds=0.01)
    for step in range(3):
        sink.write(step, {})
    assert hanging.begun.wait(120)
    sink.close()
    assert "hanging did not finish within 0.01 s; the last 2 rows are missing there" in caplog.text
    assert not hanging.is_closed
    hanging.gate.set()


class Failing(Slow):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error
        self.gate.set()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        super().write(step, metrics)


def test_error_of_a_sink_is_said_once_and_the_sink_gets_the_next_rows(caplog: pytest.LogCaptureFixture) -> None:
    class EverySecond(Failing):
        def write(self, step: int, metrics: Mapping[str, Any]) -> None:
            self.error = ValueError("no\nno") if step % 2 else None
            super().write(step, metrics)

    failing = EverySecond(ValueError())
    sink = BackgroundSink(failing, name="failing", close_seconds=120)
    for step in range(6):
        sink.write(step, {})
    sink.close()
    assert failing.steps == [0, 2, 4] and failing.is_closed and sink.num_left_out == 3
    first, last = caplog.messages
    assert first.startswith("metrics: failing failed: ValueError: no no; the run goes on, metrics.jsonl has every row")
    assert last == "metrics: failing did not get 3 rows in all"


def test_samples_and_alarms_reach_sinks_that_take_them() -> None:
    sink = BackgroundSink(Slow(), name="numbers only")
    assert isinstance(sink, ShowsSamples) and isinstance(sink, TakesAlarms)
    sink.write_samples(1, [])
    sink.alarm(1, "drop", "text")
    sink.close()
