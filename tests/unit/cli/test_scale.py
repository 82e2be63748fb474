"""Messages between `asyncrl scale` and `asyncrl run` that need no fleet; test_fleet.py tests them with a fleet."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors.fleet_scaler import FleetScaler
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.cli import scale, tap
from asyncrl.errors import ConfigError
from asyncrl.messages.control import FleetSize, FleetStatus
from asyncrl.messages.topics import FLEET, FLEET_STATUS
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

DEMO = ROOT / "examples" / "demo.toml"


class Full:
    """A fleet with room for two workers."""

    changed = asyncio.Event()

    def resize(self, size: FleetSize) -> None: ...

    def status(self) -> FleetStatus:
        return FleetStatus(request="older", rollout_workers=2, problem="no room")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_command_that_may_not_wait_is_refused_in_one_line(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--timeout: must be > 0 seconds, got "):
        scale.scale(config.load(DEMO, ["learner.device=cpu"]), 1, token="", seconds=seconds)


@pytest.mark.parametrize("size", [-1, 10**9])
def test_a_size_out_of_range_is_refused_in_one_line(size: int) -> None:
    with pytest.raises(ConfigError, match="--rollout-workers: must be in 0.."):
        scale.scale(config.load(DEMO, ["learner.device=cpu"]), size, token="", seconds=1.0)


async def test_a_command_says_how_long_it_has_waited_for_an_answer() -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    with pytest.raises(ConfigError, match="no `asyncrl run` answered in") as refused:
        await scale._ask(bus, "demo", 3, seconds=0.05)
    assert f"in {scale.ANSWER_SECONDS:.0f} s" not in str(refused.value)


async def test_a_size_asked_for_while_another_is_refused_is_not_overwritten() -> None:
    newer = FleetSize(rollout_workers=1, request="newer")

    class Busy(MemoryBus):
        """A bus on which a new size is requested just as the answer to the previous request is put."""

        async def put(self, topic: Any, message: Any, *, key: str = "") -> None:
            await super().put(topic, message, key=key)
            if topic is FLEET_STATUS:
                await super().put(FLEET, newer)

    bus = Busy(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    fleet_of_two = Full()
    sizer = FleetScaler(lambda: asyncio.sleep(0, bus), fleet_of_two)
    sizer._requested = FleetSize(rollout_workers=9, request="older")
    telling = asyncio.create_task(sizer._report(bus))
    for _ in range(100):
        await asyncio.sleep(0)
    telling.cancel()
    assert (await bus.states(FLEET))[""] == newer


async def test_a_size_that_nobody_hears_is_kept_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "ANSWER_SECONDS", 0.1)
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    with pytest.raises(ConfigError, match="no `asyncrl run` answered .* counts when the run is resumed"):
        await scale._ask(bus, "demo", 3, seconds=60)
    assert (await bus.states(FLEET))[""].rollout_workers == 3


async def test_a_run_that_ends_meanwhile_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its nats-server ended with it, so requests to the bus get no answer. The end of a run elsewhere is not known."""

    class Ended(MemoryBus):
        async def states(self, topic: Any, *, under: str = "") -> Any:
            await asyncio.Event().wait()

    async def observe(*_: Any, **__: Any) -> MemoryBus:
        return Ended(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)

    monkeypatch.setattr(scale, "observe", observe)
    monkeypatch.setattr(scale, "GRACE_SECONDS", 0.0)
    run = config.load(DEMO, ["learner.device=cpu", f"run.directory={tmp_path}"])
    elsewhere = dataclasses.replace(run, bus=dataclasses.replace(run.bus, url="nats://127.0.0.1:1"))
    assert await scale._scale(elsewhere, 3, token="", seconds=0.05) == 1
    assert "its bus does not answer any more" in capsys.readouterr().out

    address = run.run_directory / "bus.json"  # `asyncrl run` removes it at its end
    address.parent.mkdir()
    address.write_text('{"url": "nats://127.0.0.1:1", "token": "a"}')
    monkeypatch.setattr(tap, "LOOK_SECONDS", 0.0)
    waiting = asyncio.ensure_future(scale._scale(run, 3, token="", seconds=600.0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    address.unlink()
    assert await waiting == 1
    assert "not yet 3 rollout workers after " in (said := capsys.readouterr().out) and "the run has ended" in said
