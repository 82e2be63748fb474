"""Reporting a step: what is only for looking never ends a run."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from asyncrl.actors.learner.disk import Disk
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.messages.topics import EVALUATION_METRICS, METRICS
from asyncrl.policies.metric import Metric
from tests.conftest import BUS_SIZES


class Rows:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Metric]] = []

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self.rows.append(metrics)

    def close(self) -> None: ...


async def test_a_row_over_the_limit_of_the_bus_goes_to_observers_without_its_longest_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus, rows = MemoryBus(**(BUS_SIZES | {"max_message_bytes": 2**16})), Rows()
    reporter, disk = MetricsReporter(bus, [rows]), Disk(WaitTracker())
    parts: dict[str, Metric] = {f"reward/{number:04d}{'x' * 120}": 1.0 for number in range(2000)}
    for step in (1, 2):
        await reporter.report(step, parts | {"loss": 0.5}, workers=(), cursor=0, disk=disk)
    await reporter.report_evaluation(1, parts | {"evaluation/complete": 1.0}, disk=disk)
    found = await bus.states(METRICS)
    assert found[""].step == 2 and found[""].numbers["loss"] == 0.5
    assert found[EVALUATION_METRICS].numbers["evaluation/complete"] == 1.0
    assert all(len(row) >= 2000 for row in rows.rows)
    assert caplog.text.count("larger than bus.max_message_bytes") == 1


async def test_too_many_categories_of_answers_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bus, rows = MemoryBus(**(BUS_SIZES | {"max_message_bytes": 2**16})), Rows()
    reporter, disk = MetricsReporter(bus, [rows]), Disk(WaitTracker())
    for step in range(1, 4):
        named: dict[str, Metric] = {f"reward/category/error {step}.{n}": 0.01 for n in range(40)}
        await reporter.report(step, named, workers=(), cursor=0, disk=disk)
    assert [sum("category" in name for name in row) for row in rows.rows] == [40, 25, 1]
    assert rows.rows[1]["reward/category/other"] == pytest.approx(0.16)
    assert caplog.text.count("as reward/category/other") == 1
