"""harness = "package.module:Harness": samples run in a pool of children; failed children are handled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import venv
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.agent.harnesses import python_harness
from asyncrl.environments.agent.harnesses.protocol import Task
from asyncrl.environments.agent.harnesses.python_harness import Options, PythonHarness
from asyncrl.errors import ConfigError, Outage, RolloutError
from tests.unit.environments.harnesses.tasks import ENDPOINT, TASK, read_when_there, until_gone

PLAYERS = "tests.unit.environments.harnesses.players"


@contextlib.asynccontextmanager
async def pool(name: str, **options: Any) -> AsyncIterator[PythonHarness]:
    harness = PythonHarness(f"{PLAYERS}:{name}", Options(**{"processes": 1, **options}))
    try:
        yield harness
    finally:
        await harness.close()


async def test_one_child_plays_many_samples_and_never_in_this_process() -> None:
    async with pool("Player", options={"factor": 2.0}) as harness:
        outcomes = await asyncio.gather(*(harness(TASK, ENDPOINT) for _ in range(8)))
    assert {one.reward for one in outcomes} == {14.0}
    assert len({one.metrics["pid"] for one in outcomes}) == 1
    assert outcomes[0].metrics["pid"] != os.getpid()
    assert sorted(one.metrics["played"] for one in outcomes) == list(range(1, 9))


@pytest.mark.parametrize(
    ("module", "options", "problem"),
    [
        ("", {}, "ModuleNotFoundError: No module named 'my_harness'"),
        ("import no_such_package", {}, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit('not today')", {}, "SystemExit: not today"),
        ("other = 1", {}, "AttributeError: module 'my_harness' has no attribute 'play'"),
        ("play = 7", {}, "TypeError: my_harness:play cannot be called; a harness is called with (task, endpoint)"),
        ("def play(task): pass", {}, "TypeError: my_harness:play takes other arguments: too many positional arguments"),
        ("class play: pass", {}, "TypeError: my_harness:play has no __call__"),
        ("class play:\n def __call__(self, task): pass", {}, "TypeError: my_harness:play takes other arguments"),
        ("def play(task, endpoint): pass", {"a": 1}, "TypeError: my_harness:play takes no options, got a"),
        ("import os\nos._exit(3)", {}, "its import ends with exit code 3"),
        (
            "print('hello')\ndef play(task, endpoint, more): pass",
            {},
            "TypeError: my_harness:play takes other arguments",
        ),
    ],
)
def test_a_harness_that_no_child_could_play_is_refused_before_the_run_starts(
    module: str, options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    if module:
        (tmp_path / "my_harness.py").write_text(module)
    harness = PythonHarness("my_harness:play", Options(directory=str(tmp_path), options=options))
    with pytest.raises(ConfigError, match=re.escape(problem)) as refused:
        harness.check_machine()
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_beside_the_harness_replaces_no_module_of_python(tmp_path: Path) -> None:
    for name in ("http", "json", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "my_harness.py").write_text("import http.client\ndef play(task, endpoint): pass")
    PythonHarness("my_harness:play", Options(directory=str(tmp_path))).check_machine()
    with pytest.raises(ConfigError, match=r"ImportError: queue.py is hidden by .*queue.py, a module of the same name"):
        PythonHarness("queue:play", Options(directory=str(tmp_path))).check_machine()


async def test_samples_at_once_are_shared_among_children() -> None:
    async with pool("Player", processes=2) as harness:
        outcomes = await asyncio.gather(*(harness(TASK, ENDPOINT) for _ in range(4)))
    assert sorted(one.metrics["played"] for one in outcomes) == [1, 1, 2, 2]


async def test_a_plain_function_that_blocks_takes_no_other_samples_thread_however_few_cores_there_are() -> None:
    """asyncio's own threads are at most 32: calls that never return, such as of a server that hangs, would use them up,
    and every later sample would wait for one until its time is over."""
    async with pool("meets") as harness:
        outcomes = await asyncio.gather(*(harness(TASK, ENDPOINT) for _ in range(40)))
    assert [one.reward for one in outcomes] == [1.0] * 40


async def test_what_a_harness_raises_fails_its_sample_and_not_its_child() -> None:
    async with pool("refuses") as harness:
        for _ in range(2):
            with pytest.raises(RolloutError, match=f"harness {PLAYERS}:refuses: raised ValueError: no 7 here"):
                await harness(TASK, ENDPOINT)
    async with pool("missing") as harness:
        with pytest.raises(RolloutError, match="has no attribute 'missing'"):
            await harness(TASK, ENDPOINT)


async def test_a_service_that_is_away_is_an_outage_and_a_bug_is_none() -> None:
    for name, is_outage in (("unreachable", True), ("refuses", False)):
        async with pool(name) as harness:
            with pytest.raises(RolloutError) as raised:
                await harness(TASK, ENDPOINT)
        assert isinstance(raised.value, Outage) is is_outage


async def test_a_child_that_dies_is_replaced() -> None:
    async with pool("leaves") as harness:
        for _ in range(2):
            with pytest.raises(RolloutError, match="its process ended with exit code 9"):
                await harness(TASK, ENDPOINT)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
async def test_a_harness_reaches_its_endpoint_without_the_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "b.org")
    async with pool("names_proxies", inherit=(name,)) as harness:
        assert (await harness(TASK, ENDPOINT)).metrics == {"endpoint": 0.0, "other": 1.0}


def test_a_child_that_dies_before_it_has_read_its_sample_is_told_in_words() -> None:
    """On uvloop, as in a worker: it raises RuntimeError where a socket has been closed."""
    uvloop = pytest.importorskip("uvloop")

    async def play() -> None:
        async with pool("leaves", processes=1) as harness:
            for result in await asyncio.gather(*(harness(TASK, ENDPOINT) for _ in range(8)), return_exceptions=True):
                assert "its process ended with exit code 9" in str(result)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


async def test_a_cancelled_sample_is_cancelled_in_its_child_which_lives(tmp_path: Path) -> None:
    async with pool("waits") as harness:
        sample = asyncio.ensure_future(harness(Task(prompt=str(tmp_path)), ENDPOINT))
        await read_when_there(tmp_path / "begun")
        sample.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sample
        assert (tmp_path / "cancelled").exists()
        assert [one.program.has_ended for one in harness._children] == [False]


async def test_hanging_child_is_killed_with_its_processes_and_its_samples_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_harness, "CANCEL_SECONDS", 0.2)
    async with pool("blocks") as harness:
        other = asyncio.ensure_future(harness(Task(prompt=""), ENDPOINT))
        hung = asyncio.ensure_future(harness(Task(prompt=str(tmp_path)), ENDPOINT))
        program = int(await read_when_there(tmp_path / "begun"))
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        with pytest.raises(RolloutError, match=r"did not end a sample within 0\.2 s, and was killed"):
            await other
        await until_gone(program)


async def test_a_harness_runs_in_a_virtual_environment_where_asyncrl_is_not(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "agent.py").write_text(
        "import importlib.util, sys\n"
        "async def play(task, endpoint):\n"
        "    return {'reward': 1, 'metrics': {'asyncrl': importlib.util.find_spec('asyncrl') is not None,\n"
        "                                     'own': sys.prefix == " + repr(str(tmp_path / "venv")) + "}}\n"
    )
    options = Options(processes=1, venv=str(tmp_path / "venv"), directory=str(tmp_path), environment={"PYTHONPATH": ""})
    harness = PythonHarness("agent:play", options)
    try:
        assert (await harness(TASK, ENDPOINT)).metrics == {"asyncrl": 0.0, "own": 1.0}
    finally:
        await harness.close()
