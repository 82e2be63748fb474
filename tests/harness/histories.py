"""Forged histories: changed lines with valid checksums."""

from __future__ import annotations

import zlib
from pathlib import Path


def forge(path: Path, old: str, new: str) -> None:
    """Replace every ``old`` by ``new`` in the history at ``path``."""
    lines = []
    for line in path.read_bytes().splitlines():
        text = line.rpartition(b', "crc": "')[0].replace(old.encode(), new.encode())
        checksum = zlib.crc32(text + b"}")
        lines.append(text + f', "crc": "{checksum:08x}"}}\n'.encode())
    path.write_bytes(b"".join(lines))
