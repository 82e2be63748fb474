"""Rows of data files by number, whatever happens to the files."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.row_files import open_rows
from asyncrl.errors import ConfigError


def accept(row: dict[str, Any], where: str) -> None:
    """Check nothing."""


def write(path: Path, name: str) -> Path:
    path.write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(3)))
    return path


def test_rows_stay_those_that_were_checked_when_the_file_is_removed_or_replaced(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path / "data.jsonl", "old"), check=accept)
    write(tmp_path / "new.jsonl", "other").rename(tmp_path / "data.jsonl")
    assert rows.row(1) == {"prompt": "old1"}
    (tmp_path / "data.jsonl").unlink()
    assert rows.row(2) == {"prompt": "old2"}


def stale(*_: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("failing", [(Path, "open"), (os, "pread")], ids=["when opened", "later"])
def test_unreadable_data_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[Any, str]
) -> None:
    path = write(tmp_path / "data.jsonl", "n")
    monkeypatch.setattr(*failing, stale)
    with pytest.raises(ConfigError, match="data.jsonl: cannot be read: Stale file handle$"):
        open_rows(path, check=accept)


def test_rows_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    """The learner reads new rows, and those of lost prompts, at the same time. Long rows do not fit one buffer."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number} " + "x" * 9000}) + "\n" for number in range(50)))
    rows = open_rows(str(path), check=accept)
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda index: rows.row(index % 50)["prompt"].split()[0], range(4000)))
    assert read == [str(index % 50) for index in range(4000)]
