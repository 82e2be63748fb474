"""Looking at a run folder from elsewhere runs none of its code, and sends none of its reader's secrets anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncrl as package
from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.audit.run_folder import RecordedRun, run_at
from asyncrl.cli import evaluate
from asyncrl.config import record as config_record
from asyncrl.config.bus import BusSection
from asyncrl.errors import AsyncRLError
from asyncrl.os_process import process_space
from tests import ROOT
from tests.harness.command import asyncrl

SECRET = "mine:password"


class Listener:
    """A stranger's server: keeps what it is sent."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    self.heard.append(b"connected")
                    connection.sendall(b'INFO {"max_payload":8388608,"auth_required":true,"headers":true}\r\n')
                    self.heard.append(connection.recv(4096))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def write_folder(place: Path, *, host: str, **bus: Any) -> Path:
    """Write a run folder whose record says these keys of the bus, and beside it the code that it names."""
    (place / "evil_bus.py").write_text(f"open({str(place / 'executed')!r}, 'w').close()\nclass Bus: ...\n")
    (place / "secrets").write_text(SECRET)
    run = config.load(ROOT / "examples" / "demo.toml", [f"run.directory={place}"])
    table = config_record.as_table(run)
    table["bus"] |= bus
    history = History(place / "demo" / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=table, host=host)
    history.close()
    return place / "demo"


def look(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Look at the folder in every way."""
    for verb in ("audit", "samples", "doctor", "tap"):
        asyncrl(verb, folder, *(["trajectories"] if verb == "tap" else []), capsys=capsys)
    asyncrl("top", folder, "--once", capsys=capsys)
    with contextlib.suppress(AsyncRLError):
        list(package.open_run(folder).trajectories())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ASYNCRL_BUS_TOKEN", SECRET)
    return tmp_path


def test_looking_at_a_folder_runs_none_of_its_code_and_sends_no_secrets(
    place: Path, listener: Listener, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    bus = {"url": listener.url, "credentials": str(place / "secrets"), "address": listener.url}
    folder = write_folder(place, host="elsewhere", kind="evil_bus:Bus", **bus)
    look(folder, capsys)
    assert listener.heard == [] and not (place / "executed").exists()
    (line,) = set(caplog.messages)
    assert line.startswith(f"{folder}: its learner ran elsewhere, so its recorded bus.kind, bus.url, bus.credentials, ")
    assert line.endswith("are not used; name what you trust, as in --set bus.url=nats://HOST:PORT")


def test_a_server_that_a_folder_names_is_sent_only_the_token_beside_its_address(
    place: Path, listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(place, host="elsewhere")
    copied = folder.rename(place / "copied")
    address = {"url": listener.url, "token": "theirs", "worker_token": "theirs", "pid": 1, "host": "elsewhere"}
    (copied / "bus.json").write_text(json.dumps(address))
    asyncrl("doctor", copied, capsys=capsys)
    assert listener.heard and SECRET.encode() not in b"".join(listener.heard)
    assert b"password" not in b"".join(listener.heard)


def test_the_recorded_bus_counts_where_the_run_ran_or_once_the_user_names_its_address(place: Path) -> None:
    recorded = {"url": "nats://there:1", "credentials": str(place / "secrets")}
    folder = write_folder(place, host=process_space(), **recorded)
    assert run_at(folder, [], verb="top").bus.url == "nats://there:1"
    assert run_at(folder, [], verb="top").bus.credentials == str(place / "secrets")
    (folder / HISTORY_FILE).unlink()
    write_folder(place, host="elsewhere", kind="evil_bus:Bus", **recorded)
    found = RecordedRun(folder).bus_settings(["bus.url=nats://mine:2"]).bus
    assert (found.url, found.credentials, found.kind) == ("nats://mine:2", str(place / "secrets"), BusSection().kind)
    found = RecordedRun(folder).bus_settings(["bus.url=nats://mine:2", "bus.kind=evil_bus:Bus"]).bus
    assert found.kind == "evil_bus:Bus"


def test_a_record_of_another_user_of_this_machine_is_as_foreign(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(place, host=process_space(), url="nats://theirs:1", credentials=str(place / "secrets"))
    monkeypatch.setattr("os.geteuid", lambda: (folder / HISTORY_FILE).stat().st_uid + 1)
    found = RecordedRun(folder).bus_settings([]).bus
    assert (found.url, found.credentials) == ("", "")


@pytest.mark.parametrize("name", [HISTORY_FILE, "samples.jsonl", "checkpoints/step-00000001/learner.json"])
def test_a_pipe_in_a_folder_is_refused_and_not_read_for_ever(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(place, host="elsewhere")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / name)
    for verb in ("audit", "samples", "doctor", "top", "trace"):
        code, _, err = asyncrl(verb, folder, capsys=capsys)
        assert (code, err.count("\n"), f"{folder / name}: is a pipe or a device" in err) == (2, 1, True), (verb, err)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"url": "nats://127.0.0.1:9", "token": "", "pid": -1, "host": "HERE"}']
)
def test_a_hostile_bus_file_is_one_line(place: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(place, host="elsewhere")
    (folder / "bus.json").write_text(text.replace("HERE", process_space()))
    code, _, err = asyncrl("doctor", folder, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and ("is damaged" in err or "was killed" in err)
    assert asyncrl("audit", folder, capsys=capsys)[::2] == (0, "")


def test_an_evaluation_takes_no_program_from_a_folder(place: Path) -> None:
    recorded = evaluate._recorded_sections(RecordedRun(write_folder(place, host="elsewhere")))
    assert "max_new_tokens" in recorded["rollout"] and "options" not in recorded["rollout"]
