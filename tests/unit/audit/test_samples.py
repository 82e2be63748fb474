"""Why `asyncrl samples` and `asyncrl audit` have nothing to show."""

from __future__ import annotations

from pathlib import Path

from asyncrl.audit.samples import RunSamples
from asyncrl.cli.audit import table
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.policies.audit.accounting import account
from tests.harness import buses, contract_adapters
from tests.harness.learning import memory_bus


async def test_tells_a_trimmed_log_from_an_empty_one(tmp_path: Path) -> None:
    samples, bus = RunSamples(contract_adapters.run_of(directory=tmp_path), None, token=""), memory_bus()
    assert [one async for one in samples.logged(bus)] == []
    assert samples.why_no_log == "its log is empty: no group has arrived yet"
    await bus.publish(TRAJECTORIES, buses.group(0), key="0")
    await bus.trim(TRAJECTORIES, through=1)
    assert [one async for one in samples.logged(bus)] == []
    assert "trimmed unless checkpoint.keep_log = true" in samples.why_no_log


def test_audit_says_that_nothing_was_recorded() -> None:
    made = account([], saved=None, bus=None)
    assert table(made, Path("runs/one")).splitlines()[-1] == "nothing is recorded yet: no learner has begun"
