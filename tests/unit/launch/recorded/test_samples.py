"""Why `asyncrl samples` and `asyncrl audit` have nothing to show."""

from __future__ import annotations

from pathlib import Path

from asyncrl.audit.samples import RunSamples
from asyncrl.cli.audit import table
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.audit.accounting import account
from tests.harness import buses, contract_adapters
from tests.harness.learning import memory_bus


async def test_an_empty_log_is_one_that_nothing_has_come_to_or_one_that_was_trimmed(tmp_path: Path) -> None:
    samples, bus = RunSamples(contract_adapters.run_of(directory=tmp_path), None, token=""), memory_bus()
    assert [one async for one in samples.logged(bus)] == []
    assert samples.why_no_log == "its log is empty: no group has arrived yet"
    await bus.publish(TRAJECTORIES, buses.group(0), key="0")
    await bus.trim(TRAJECTORIES, through=1)
    assert [one async for one in samples.logged(bus)] == []
    assert "trimmed unless checkpoint.keep_log = true" in samples.why_no_log


def test_an_audit_of_a_run_that_has_recorded_nothing_says_so() -> None:
    made = account([], saved=None, bus=None)
    assert table(made, Path("runs/one")).splitlines()[-1] == "nothing is recorded yet: no learner has begun"
