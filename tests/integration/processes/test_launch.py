"""`asyncrl run` starts its processes in the right place, and restarts them only if that may help."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.launchers.placement import Placement
from asyncrl.launch.processes import child_process, launch, process_specs
from asyncrl.launch.processes.process_manager import Outcome
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

SCRIPT = """#!/bin/sh
# In place of `python -m asyncrl ROLE RUN.toml ...`
echo "$3 $CUDA_VISIBLE_DEVICES $6" >> {log}
{body}
"""


class Stage:
    """Launches a script in place of every process of a run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.log = folder / "starts"
        self.bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        monkeypatch.setattr(child_process, "BACK_OFF_SECONDS", 0.0)
        monkeypatch.setattr(launch, "connect", self._connect)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(self, body: str, *, placement: Placement) -> int:
        """Return the exit code of a run whose processes execute ``body``, which may read $3 (the role) and the log of
        starts."""
        return asyncio.run(self.launch(body, placement=placement)).exit_code

    async def launch(self, body: str, *, placement: Placement) -> Outcome:
        script = self.folder / "process"
        script.write_text(SCRIPT.format(log=self.log, body=body.replace("LOG", str(self.log))))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self._monkeypatch.setattr(sys, "executable", str(script))
        self._monkeypatch.setattr(process_specs, "placement", lambda run, *, places: placement)
        return await launch.launch(self._config(), run_file=Path("RUN.toml"), overrides=[], resume=False, token="")

    async def _connect(self, run: RunConfig, *, token: str) -> MemoryBus:
        return self.bus

    def _config(self) -> RunConfig:
        made = config.load(ROOT / "examples" / "demo.toml")
        return dataclasses.replace(
            made,
            run=dataclasses.replace(made.run, directory=str(self.folder)),
            bus=dataclasses.replace(made.bus, url="nats://nobody:1"),  # starts no server
        )

    @property
    def starts(self) -> list[str]:
        """Return role, visible GPUs and name of each started process, in any order."""
        return sorted(line.rstrip() for line in self.log.read_text().splitlines())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


ON_THE_CPU = Placement(learner=(), workers=())
ONCE_MORE = '[ "$3" = rollout-worker ] || [ $(grep -c ^learner LOG) -ge 2 ]'
"""Workers end normally; the learner does so only at its second start."""


def test_process_sees_its_own_gpus_at_every_start(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run(ONCE_MORE, placement=Placement(learner=(0, 1), workers=((2,), (3,)))) == 0
    assert stage.starts == ["learner 0,1", "learner 0,1", "rollout-worker 2 w0", "rollout-worker 3 w1"]
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert said == [["learner", "GPU", "0,", "1"], ["w0", "GPU", "2"], ["w1", "GPU", "3"]]


def test_gpus_are_those_that_the_launcher_sees(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert stage.run(ONCE_MORE, placement=Placement(learner=(0,), workers=((1,),))) == 0
    assert stage.starts == ["learner 4", "learner 4", "rollout-worker 6 w0"]


def test_machine_without_gpus_sets_nothing(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run(ONCE_MORE, placement=Placement(learner=(), workers=((),))) == 0
    assert stage.starts == ["learner", "learner", "rollout-worker  w0"]
    assert capsys.readouterr().out == ""


def test_process_that_keeps_dying_is_restarted_three_times(stage: Stage) -> None:
    assert stage.run("exit 9", placement=ON_THE_CPU) == 1
    assert stage.starts == ["learner"] * 4


def test_exit_code_2_is_not_restarted(stage: Stage) -> None:
    assert stage.run("exit 2", placement=ON_THE_CPU) == 2
    assert stage.starts == ["learner"]


def test_learner_drained_from_outside_is_no_success(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run('[ "$3" = rollout-worker ] || exit 130', placement=ON_THE_CPU) == 130
    assert stage.starts == ["learner"]
    assert "continue with --resume" in capsys.readouterr().err


def test_run_does_not_need_a_reader_of_its_output(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Unread())
    assert stage.run('[ "$3" = learner ] || sleep 0.1', placement=Placement(learner=(0,), workers=((1,),))) == 0


def test_cancelled_run_is_drained(stage: Stage) -> None:
    """As from a program: `asyncio.run` cancels on Ctrl-C, and a notebook when its cell is interrupted."""
    drained, ready = stage.folder / "drained", stage.folder / "ready"
    body = f"trap 'touch {drained}; exit 0' TERM\ntouch {ready}\nwhile true; do sleep 0.01; done"

    async def main() -> None:
        task = asyncio.create_task(stage.launch(body, placement=ON_THE_CPU))
        while not ready.exists():  # before, the signal would end the shell
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert drained.exists()


def launch_demo(folder: Path, *overrides: str) -> int:
    demo = ROOT / "examples" / "demo.toml"
    run = config.load(demo, [f"run.directory={folder}", *overrides])
    return asyncio.run(launch.launch(run, run_file=demo, overrides=[], resume=False, token="")).exit_code


def test_refuses_a_run_that_is_up(tmp_path: Path) -> None:
    folder, pid = tmp_path / "demo", os.getppid()  # any living process
    with EmbeddedServer(folder / "nats") as server:
        (folder / "bus.json").write_text(json.dumps({"url": server.url, "token": "", "pid": pid}))
        with pytest.raises(ConfigError, match=rf"demo: this run is up \(`asyncrl run`, process {pid}\)") as refused:
            launch_demo(tmp_path)
        assert "kill" not in str(refused.value)
        with pytest.raises(ConfigError, match="demo: this run is up"):
            launch_demo(tmp_path, f"bus.port={server.port}")
        (folder / "bus.json").unlink()
        with pytest.raises(ConfigError, match=f"end it with `kill {server.pid}`"):
            launch_demo(tmp_path)


@pytest.mark.slow
def test_unreachable_bus_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="127.0.0.1:9"):
        launch_demo(tmp_path, "bus.url=nats://127.0.0.1:9", "bus.connect_seconds=0.3")
    assert list(tmp_path.iterdir()) == []
