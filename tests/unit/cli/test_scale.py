"""Commands about a run that is up: its size, its health, and the ranks that join it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.cli import arguments, doctor, learner, scale
from asyncrl.errors import ConfigError, NoSuchRun
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


async def test_doctor_does_not_take_a_run_that_ended_for_a_bus_that_died(tmp_path: Path) -> None:
    """`asyncrl run` removes its address when it ends; a doctor may be listening at that moment."""
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "over"\ndirectory = "{tmp_path}"\n[model]\npath = ""\n[data]\npath = ""\n'
    )
    with pytest.raises(NoSuchRun, match="no `asyncrl run` is up"):
        await doctor._listen(config.load(tmp_path / "run.toml"), token="")


def test_a_rank_that_joins_has_what_the_channel_needs_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load(ROOT / "examples" / "demo.toml", ["weights.channel=nccl"])

    class Backend:
        @staticmethod
        def rank_here(run: config.RunConfig) -> int:
            return 1

    found: list[str] = []

    def serve(run: config.RunConfig, *, rank: int, standby: str) -> int:
        found.append(os.environ["NCCL_CUMEM_ENABLE"])
        return 0

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(arguments, "load", lambda options: run)
    monkeypatch.setattr(learner, "backend_class", lambda run: Backend)
    monkeypatch.setattr(learner, "_serve", serve)
    assert learner.run(argparse.Namespace(resume=False, standby="")) == 0
    assert found == ["0"]
