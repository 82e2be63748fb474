"""An SGLang server as a process: its end is noticed, and no part of it outlives its owner."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.engines.sglang import server as sglang_server
from asyncrl.errors import ConfigError, EngineDied, HopelessError
from tests.harness.engines import Model
from tests.harness.process_trees import all_gone, descendants, end_of
from tests.unit.engines.sglang.fake_server import make_engine


async def test_a_missing_sglang_says_how_to_install_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install"):
        await make_engine(model, tmp_path / "log").start()


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


OWNER = """
import asyncio, os, sys
from pathlib import Path
from asyncrl.engines.sglang.server import ServerProcess

async def main():
    server = ServerProcess([sys.executable, "-c", sys.argv[1]], environment=os.environ, log_path=Path(sys.argv[2]))
    await server.start()
    print("started", flush=True)
    await server.wait()

asyncio.run(main())
"""


async def test_closing_ends_the_whole_tree(tmp_path: Path) -> None:
    server = sglang_server.ServerProcess(
        [sys.executable, "-c", TREE], environment=os.environ, log_path=tmp_path / "log"
    )
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # other tests' processes
    await server.start()
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(os.getpid(), but=others)
    assert len(tree) >= 3  # warden, command, and the child in its own session
    assert server.is_alive
    await server.close()
    assert not server.is_alive
    assert await asyncio.to_thread(all_gone, tree)


def wait_for_text(path: Path, text: str) -> None:
    """Wait until the log contains ``text``. Polls, because no event announces a write to a file."""
    poll = select.poll()
    while text not in path.read_text():
        poll.poll(20)


async def test_the_server_goes_with_its_owner(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, TREE, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"started\n"
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(owner.pid)
    assert len(tree) == 3
    owner.send_signal(signal.SIGKILL)
    await end_of(owner)
    assert await asyncio.to_thread(all_gone, tree)


async def test_ctrl_c_in_a_terminal_is_for_the_worker_alone(tmp_path: Path) -> None:
    """The terminal signals the whole foreground group, but the worker needs its server to finish its samples."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{OWNER}",
        TREE,
        str(tmp_path / "log"),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"started\n"
    await asyncio.to_thread(wait_for_text, tmp_path / "log", "child")
    tree = descendants(owner.pid)
    os.killpg(owner.pid, signal.SIGINT)
    is_over = await asyncio.to_thread(all_gone, tree[:1], seconds=1.0)
    owner.kill()
    await end_of(owner)
    assert not is_over
    assert await asyncio.to_thread(all_gone, tree)


async def test_a_server_that_dies_while_starting_is_noticed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sglang_server, "server_command", lambda *_, **__: [sys.executable, "-c", "exit('no GPU found')"]
    )
    with pytest.raises(EngineDied) as caught:
        await make_engine(model, tmp_path / "log").start()
    assert str(caught.value) == f"SGLang has ended: no GPU found (log: {tmp_path / 'log'})"


@pytest.mark.parametrize(
    ("earlier", "is_hopeless"),
    [
        ("", False),
        ("no GPU found\n", True),
        ("no disk found\n", False),
        ('INFO: "GET /health HTTP/1.1" 200 OK\nno GPU found\n', False),
    ],
)
async def test_a_server_that_has_never_been_up_ends_the_run_when_it_dies_by_the_same_reason_again(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: str, is_hopeless: bool
) -> None:
    """Each start takes minutes. One that has been up may be mended by a restart: a disk that was away, a GPU that is
    free again."""
    log = tmp_path / "log"
    log.write_text(earlier)
    command = [sys.executable, "-c", "exit('no GPU found')"]
    monkeypatch.setattr(sglang_server, "server_command", lambda *_, **__: command)
    with pytest.raises(HopelessError if is_hopeless else EngineDied, match="SGLang has ended: no GPU found"):
        await make_engine(model, log).start()


NO_MEMORY = """\
[2026-11-29 10:46:02] server_args=ServerArgs(model_path='m', mem_fraction_static=0.1)
[2026-11-29 10:46:09] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 3, in run_scheduler_process
    raise RuntimeError(msg)
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-11-29 10:46:10] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).
"""

REASONS = {
    "the error of a rank, not its echo": (
        NO_MEMORY,
        "RuntimeError: Not enough memory. Please try to increase engine.options.server_arguments.mem-fraction-static.",
    ),
    "an option that the server does not know": (
        "usage: sglang serve [-h]\n  [--config CONFIG]\nsglang serve: error: unrecognized arguments: --foo 3\n",
        "sglang serve: error: unrecognized arguments: engine.options.server_arguments.foo 3",
    ),
    "only the echo": ("RuntimeError: Rank 0 scheduler died\nbye\n", "RuntimeError: Rank 0 scheduler died"),
    "no error": ("one\ntwo\n\n", "two"),
    "an error without a message": ("Traceback:\n  x\nAssertionError\n", "AssertionError"),
    "an endless one": (f"ValueError: {'x' * 5000}\n", f"ValueError: {'x' * 288} ..."),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_failed_start_is_one_short_line_with_the_reason_first(case: str) -> None:
    log, reason = REASONS[case]
    assert sglang_server.reason_in(log) == reason


async def test_the_reason_of_an_earlier_start_is_not_the_reason_of_this_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("RuntimeError: earlier\n")
    process = sglang_server.ServerProcess([sys.executable, "-c", "print('now')"], environment=os.environ, log_path=log)
    await process.start()
    await process.wait()
    assert process.problem() == f"now (log: {log})"
