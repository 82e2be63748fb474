"""Commands about a run that is up: its size, its health, and the ranks that join it."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Container
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.cli import arguments, doctor, learner, scale
from asyncrl.errors import BusError, ConfigError, NoAnswer, NoSuchRun
from asyncrl.messages.topics import FLEET
from asyncrl.policies.health.faults import Observation
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

DEMO = ROOT / "examples" / "demo.toml"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_command_that_may_not_wait_is_refused_in_one_line(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--timeout: must be > 0 seconds, got "):
        scale.scale(config.load(DEMO, ["learner.device=cpu"]), 1, token="", seconds=seconds)


@pytest.mark.parametrize("size", [-1, 10**9])
def test_a_size_out_of_range_is_refused_in_one_line(size: int) -> None:
    with pytest.raises(ConfigError, match="--rollout-workers: must be in 0.."):
        scale.scale(config.load(DEMO, ["learner.device=cpu"]), size, token="", seconds=1.0)


async def test_a_size_that_nobody_hears_is_kept_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "ANSWER_SECONDS", 0.1)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    with pytest.raises(ConfigError, match="no `asyncrl run` answered .* counts when the run is resumed"):
        await scale._ask(bus, "demo", 3, seconds=60)
    assert (await bus.states(FLEET))[""].rollout_workers == 3


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


def test_a_rank_that_joins_has_what_the_channel_needs_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", ["weights.channel=nccl"])

    class Backend:
        @staticmethod
        def rank_here(run: config.RunConfig) -> int:
            return 1

    found: list[str] = []

    def serve(run: config.RunConfig, *, rank: int) -> int:
        found.append(os.environ["NCCL_CUMEM_ENABLE"])
        return 0

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(arguments, "load", lambda options: run)
    monkeypatch.setattr(learner, "backend_class", lambda run: Backend)
    monkeypatch.setattr(learner, "_serve", serve)
    assert learner.run(argparse.Namespace(resume=False)) == 0
    assert found == ["0"]
