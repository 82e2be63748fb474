"""`asyncrl profile-engine` asks a worker's server to profile, and always asks it to stop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.harness.command import asyncrl


class Server(HTTPServer):
    """Writes a trace when it is asked to stop, as SGLang does. With ``is_broken`` it refuses to begin."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.out = ""
        self.is_broken = False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(self.path)
        if self.path == "/start_profile":
            self.server.out = body["output_dir"]
        else:
            Path(self.server.out, "trace.json.gz").write_bytes(b"")
        self.send_response(400 if self.server.is_broken else 200)
        self.end_headers()
        self.wfile.write(b"Profiling is already in progress" if self.server.is_broken else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "w0.engine.url").write_text(f"http://127.0.0.1:{made.server_port}\n")
        yield made
        made.shutdown()
        thread.join()


def test_a_server_is_profiled_and_its_traces_are_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = asyncrl("profile-engine", tmp_path, "w0", "--seconds", "0.01", capsys=capsys)
    assert (code, err) == (0, "")
    assert server.asked == ["/start_profile", "/stop_profile"]
    assert str(tmp_path / "profile" / "w0" / "trace.json.gz") in out


def test_what_the_server_refuses_is_said_in_one_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.is_broken = True
    code, _, err = asyncrl("profile-engine", tmp_path, "w0", capsys=capsys)
    assert code == 1 and "400 Profiling is already in progress" in err and err.count("\n") == 1


def test_bad_input_is_refused_in_one_line(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in {
        (tmp_path, "w1"): "worker w1 has no SGLang server up on this machine; those that have: w0",
        (tmp_path, "w0", "--seconds", "0"): "--seconds 0: must be in (0, 600]",
    }.items():
        code, out, err = asyncrl("profile-engine", *arguments, capsys=capsys)
        assert (code, out) == (2, "") and text in err and err.count("\n") == 1
