"""A file is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.durable_files import write_whole


def test_a_file_is_replaced_by_what_is_written_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    for content in ("first", b"second"):
        write_whole(path, content, mode=0o600)
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_whole(path, "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
