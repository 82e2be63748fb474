"""The contract of every Launcher, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from asyncrl.config.run import LauncherSection
from asyncrl.launch.launchers.local import LocalLauncher
from asyncrl.launch.launchers.ray import Options, RayLauncher
from asyncrl.launch.port import Launcher, ProcessSpec
from asyncrl.messages.roles import WORKER
from asyncrl.os_process import process_state
from tests.harness import contract_adapters

RAY = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(params=["local", *contract_adapters.extra("launcher"), pytest.param("ray", marks=RAY)])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Launcher]:
    if request.param == "local":
        made: Launcher = LocalLauncher(run_name="fleet", log_directory=tmp_path, options=None)
    elif contract_adapters.is_extra(request.param):
        section = LauncherSection(kind=request.param)
        made = contract_adapters.load(request.param).build(
            contract_adapters.run_of(directory=tmp_path, launcher=section)
        )
    else:
        cluster = request.getfixturevalue("two_nodes")
        cluster.leave()
        made = RayLauncher(run_name="fleet", log_directory=tmp_path, options=Options(address=cluster.address))
    made.connect()
    yield made
    await made.close()
    if request.param == "ray":
        cluster.watch()
        assert cluster.left_behind() == []


@pytest.fixture
def unwritten(tmp_path: Path) -> Path:
    """A run file that is never written: a process that opens it waits, however loaded the machine is."""
    os.mkfifo(tmp_path / "run.toml")
    return tmp_path / "run.toml"


def spec(*arguments: str, name: str = "w0", **environment: str) -> ProcessSpec:
    return ProcessSpec(name=name, role=WORKER, arguments=arguments, environment=environment)


def waiting(unwritten: Path, name: str = "w0") -> ProcessSpec:
    return spec("check", str(unwritten), name=name)


async def test_a_process_ends_with_its_exit_code(launcher: Launcher) -> None:
    done, refused = await launcher.start(spec("--version")), await launcher.start(spec("nonsense", name="w1"))
    assert (await done.wait(), await refused.wait()) == (0, 2)
    assert await done.wait() == 0
    done.signal(signal.SIGTERM)


async def test_it_is_where_it_says_and_has_the_variables_it_was_given(launcher: Launcher, unwritten: Path) -> None:
    process = await launcher.start(spec("check", str(unwritten), ASYNCRL_BUS_TOKEN="a word"))
    assert process.node == socket.gethostname()
    assert process_state(process.pid) == "running"
    while not (variables := psutil.Process(process.pid).environ()):  # for an instant of its start it has none
        await asyncio.sleep(0.01)
    assert variables["ASYNCRL_BUS_TOKEN"] == "a word"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_ends_it_and_says_so(launcher: Launcher, unwritten: Path, number: int) -> None:
    process = await launcher.start(waiting(unwritten))
    process.signal(number)
    assert await process.wait() == -number


async def test_nothing_is_left_when_it_is_closed(launcher: Launcher, unwritten: Path) -> None:
    processes = [await launcher.start(waiting(unwritten, name)) for name in ("w0", "w1")]
    await launcher.close()
    for process in processes:
        assert await process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_a_name_that_was_released_may_be_started_again(launcher: Launcher) -> None:
    for _ in range(2):
        assert await (await launcher.start(spec("--version"))).wait() == 0
        await launcher.release("w0")


def test_what_is_in_the_environment_is_shown_nowhere() -> None:
    assert "hidden" not in repr(spec(ASYNCRL_BUS_TOKEN="hidden"))
