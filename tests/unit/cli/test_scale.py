"""Messages between `asyncrl scale` and `asyncrl run` that need no fleet; test_fleet.py tests them with a fleet."""

from __future__ import annotations

import pytest

from asyncrl import config
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.cli import scale
from asyncrl.errors import ConfigError
from asyncrl.messages.topics import FLEET
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
