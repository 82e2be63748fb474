"""The server that starts the processes of tests by fork."""

from __future__ import annotations

import os
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
