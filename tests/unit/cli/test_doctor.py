"""`asyncrl doctor` listens long enough to hear every actor, and reports if it could not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.cli import doctor
from asyncrl.errors import BusError, NoAnswer, NoSuchRun
from asyncrl.policies.health.faults import Observation


async def test_doctor_does_not_take_a_run_that_ended_for_a_bus_that_died(tmp_path: Path) -> None:
    """`asyncrl run` removes its address when it ends; a doctor may be listening at that moment."""
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "over"\ndirectory = "{tmp_path}"\n[model]\npath = ""\n[data]\npath = ""\n'
    )
    with pytest.raises(NoSuchRun, match="no `asyncrl run` is up"):
        await doctor._listen(config.load(tmp_path / "run.toml"), token="")


class Slow:
    """A health monitor on a busy machine: each poll takes longer than the time it counts."""

    def __init__(self, *, fails_at: Container[int]) -> None:
        self._fails_at = fails_at
        self._listened = 0.0
        self.num_polls = 0
        self.error: Exception | None = None

    async def poll(self) -> Observation:
        await asyncio.sleep(0)
        self.error = BusError("no answer") if self.num_polls in self._fails_at else None
        self._listened += 0.25 if self.num_polls and self.error is None else 0.0
        self.num_polls += 1
        return Observation(actors={}, listened=self._listened)

    async def close(self) -> None: ...


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Slow]:
    def made(*, fails_at: Container[int]) -> Slow:
        monitor = Slow(fails_at=fails_at)
        monkeypatch.setattr(doctor, "HealthMonitor", lambda connect: monitor)
        return monitor

    monkeypatch.setattr(doctor, "LISTEN_SECONDS", 2.5)
    monkeypatch.setattr(doctor, "POLL_SECONDS", 0.0)
    return made


RUN = config.only_overrides(["bus.url=nats://nowhere:1"])


async def test_doctor_that_can_hardly_hear_calls_nobody_well(
    slow: Callable[..., Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "MOST_SECONDS", 0.1)
    slow(fails_at=range(0, 10**12, 3))
    with pytest.raises(NoAnswer, match="answered too rarely to tell which processes are up"):
        await doctor._listen(RUN, token="")
