"""Metadata of a result row, and saving rows to a file of JSON lines."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError
from benchmarks.gpu.fleet import has_gpu
from benchmarks.gpu.window import Row

_PLACES: Final = ("--json", "--out", "--models", "--profile")
"""Options for output files, which do not affect the measurement."""


def command(module: str, given: Sequence[str] | None = None) -> str:
    """Return the command that repeats a measurement: this process's command line without output files."""
    words = list(sys.argv[1:] if given is None else given)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if before not in _PLACES and word.partition("=")[0] not in _PLACES
    ]
    return " ".join(["python -m", module, *kept])


@functools.cache
def machine() -> Row:
    """Return {"device": name of the first GPU}, without creating a CUDA context, which would take GPU memory."""
    versions = {}
    for package in ("torch", "sglang", "megatron-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    name = ""
    if has_gpu():
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            name = subprocess.run(words, capture_output=True, text=True, check=False).stdout.partition("\n")[0].strip()
    return {"device": name or ("GPU" if has_gpu() else "CPU"), "versions": versions}


def read(path: Path | None) -> list[Row]:
    """Return the rows of a file; none if it is not there. An incomplete last line is left out. Raises ConfigError."""
    if path is None or not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.endswith("\n")]


def _row(line: str, where: str) -> Row:
    try:
        row: Row = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where}: no whole row; delete the line, and its run is made again") from None
    return row


def keep(row: Row, path: Path | None) -> None:
    """Append a row at once, so that an interrupted benchmark keeps its results. An incomplete last line is replaced."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.read_bytes() if path.exists() else b""
        with path.open("ab") as file:
            if there and not there.endswith(b"\n"):
                file.truncate(there.rfind(b"\n") + 1)
            file.write(json.dumps(row).encode() + b"\n")
