"""Where an image may come from, and what is refused."""

from __future__ import annotations

import base64
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ImageError
from asyncrl.images import sources
from asyncrl.images.sources import read_source

DATA = b"a picture"
TEXT = base64.b64encode(DATA).decode()


def test_every_form_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    for source in (
        DATA,
        "a.png",
        str(tmp_path / "a.png"),
        f"file://{tmp_path}/%61.png",
        f"data:image/png;base64,{TEXT}",
        {"base64": TEXT},
        {"bytes": DATA, "path": None},  # Hugging Face's data sets
        {"bytes": None, "path": "a.png"},
        {"url": f"data:image/png;base64,{TEXT}"},
    ):
        assert read_source(source, folder=tmp_path, allow_urls=False) == DATA


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "is missing"),
        (7, "is of type int"),
        ({}, "an empty table"),
        ("none.png", "none.png cannot be read: No such file"),
        ("/dev/zero", "/dev/zero cannot be read: it is no file"),
        ("data:image/png,abc", "without ;base64"),
        ({"base64": "?"}, "is not base64"),
        ("https://example.org/a.png", "images.allow_urls is false"),
    ],
)
def test_what_is_nowhere_is_refused_with_its_reason(tmp_path: Path, source: Any, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read_source(source, folder=tmp_path, allow_urls=False)


def test_a_missing_file_is_named_with_the_folder_that_it_was_looked_for_in(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=f"^{tmp_path}/none.png cannot be read"):
        read_source("none.png", folder=tmp_path, allow_urls=False)


@pytest.mark.parametrize("url", ["http://a b/c.png", "http://[x/c.png", "http://a:port/c.png"])
def test_an_address_that_is_none_costs_its_row(url: str) -> None:
    with pytest.raises(ImageError, match="cannot be fetched"):
        read_source(url, folder=Path(), allow_urls=True)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na pic"])
def test_an_image_that_does_not_arrive_whole_costs_its_row_and_no_more_than_its_time(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FETCH_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> socket.socket:
            connection, _ = server.accept()
            connection.sendall(said)
            return connection

        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(answer)
            url = f"http://127.0.0.1:{server.getsockname()[1]}/a.png"
            with pytest.raises(ImageError, match=r"a\.png cannot be fetched: it is not there whole after 0\.1 s"):
                read_source(url, folder=Path(), allow_urls=True)
            held.result().close()


async def test_an_image_is_fetched_in_the_thread_of_a_loop_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(2**16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(DATA), DATA))

        sent = pool.submit(answer)
        assert read_source(f"http://127.0.0.1:{server.getsockname()[1]}/a.png", folder=Path(), allow_urls=True) == DATA
        sent.result()


@pytest.mark.parametrize("source", ["/etc/passwd", "a.png", "file:///etc/passwd", "http://localhost/"])
def test_an_agent_names_no_file_of_the_worker_and_no_address(source: str) -> None:
    with pytest.raises(ImageError):
        read_source(source, folder=None, allow_urls=False)
