"""Rows of data files by number, whatever happens to the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.row_files import open_rows


def accept(row: dict[str, Any], where: str) -> None:
    """Check nothing."""


@pytest.mark.parametrize("first", [b"\xef\xbb\xbf\n", b"\xef\xbb\xbf \r\n", b"\n"])
def test_a_first_line_with_only_a_byte_order_mark_is_blank(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "data.jsonl").write_bytes(first + b'{"prompt": "1"}\n')
    rows = open_rows(tmp_path / "data.jsonl", check=accept)
    assert (len(rows), rows.row(0), rows.where(0)) == (1, {"prompt": "1"}, f"{tmp_path}/data.jsonl:2")
