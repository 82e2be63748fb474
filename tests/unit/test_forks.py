"""The server that forks the processes of tests."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.version import VERSION
from tests.harness.forked import ForkServer

THREAD = """
import threading
if __name__ == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize("modules", [(), ("thread",)], ids=["by fork", "beside a thread, which a fork would lose"])
def test_a_process_is_started_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...]
) -> None:
    (tmp_path / "thread.py").write_text(THREAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = ForkServer(tmp_path, modules, imported=())
    try:
        assert server.call("--version") == (0, f"asyncrl {VERSION}\n")
        assert server.call("check", "nowhere.toml")[0] == 2
    finally:
        server.close()


def test_several_threads_may_wait_for_one_process(tmp_path: Path) -> None:
    server = ForkServer(tmp_path, (), imported=())
    try:
        for _ in range(10):
            command = server.run(["--version"], environment=os.environ, output=Path(os.devnull))
            with ThreadPoolExecutor(3) as threads:
                assert [future.result() for future in [threads.submit(command.wait, 60) for _ in range(3)]] == [0, 0, 0]
    finally:
        server.close()


def test_processes_share_a_server_that_ends_with_its_owner(tmp_path: Path) -> None:
    """The server does not end with the process that started it: another process may still need it."""
    with subprocess.Popen(["sleep", "600"]) as owner:
        first, second = (ForkServer(tmp_path / "shared", (), imported=(), owner=owner.pid) for _ in range(2))
        assert second._process is None
        assert first.call("--version") == second.call("--version") == (0, f"asyncrl {VERSION}\n")
        first.close()
        assert second.call("--version")[0] == 0
        owner.kill()
    assert first._process is not None
    assert first._process.wait(60) == 0
