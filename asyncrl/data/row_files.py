"""Rows of a JSONL or Parquet file by number, without holding the parsed file in memory.

A JSONL file of any size costs eight bytes a row: the offset of each line. Every line is parsed once, at open, so that a
malformed one is found before the run starts and not after an hour of it.
"""

from __future__ import annotations

import json
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError

Check = Callable[[dict[str, Any], str], None]
"""Looks at one row; the string says where it is. Raises ConfigError."""


class Rows(Protocol):
    """Rows of a file, numbered from 0."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """File and line of a row, for errors."""
        ...


def open_rows(path: Path, *, check: Check) -> Rows:
    """The rows of ``path``, each seen by ``check`` once. Raises ConfigError for a file that cannot be used."""
    if not path.is_file():
        what = "is a folder; name one file in it" if path.is_dir() else "no such data file"
        raise ConfigError(f"{path}: {what}")
    if path.suffix in (".jsonl", ".ndjson"):
        rows: Rows = JsonlRows(path, check=check)
    elif path.suffix == ".parquet":
        rows = ParquetRows(path, check=check)
    else:
        raise ConfigError(f"{path}: data must be .jsonl (one JSON object a line) or .parquet, not {path.suffix!r}")
    if not len(rows):
        raise ConfigError(f"{path}: has no rows")
    return rows


class JsonlRows:
    """One JSON object a line, UTF-8; blank lines are skipped."""

    def __init__(self, path: Path, *, check: Check) -> None:
        self._path = path
        self._offsets = array("q")
        self._lines = array("q")
        with path.open("rb") as stream:
            offset = 0
            for number, line in enumerate(stream, start=1):
                if not line.isspace() and line != BOM_UTF8:
                    where = f"{path}:{number}"
                    check(_parse(line, where), where)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> dict[str, Any]:
        with self._path.open("rb") as stream:
            stream.seek(self._offsets[index])
            return _parse(stream.readline(), self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"


class ParquetRows:
    """A Parquet file as an Arrow table, mapped or held compactly; a row becomes Python when it is asked for."""

    def __init__(self, path: Path, *, check: Check) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ConfigError(f"{path}: Parquet needs pyarrow: pip install 'asyncrl[parquet]'") from None
        self._path = path
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
        for index in range(len(self)):
            check(self.row(index), self.where(index))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        return {name: self._table.column(name)[index].as_py() for name in self._table.column_names}

    def where(self, index: int) -> str:
        return f"{self._path} row {index + 1}"


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.removeprefix(BOM_UTF8), object_pairs_hook=_object)
    except _TwiceNamed as error:
        raise ConfigError(f"{where}: the key {error.args[0]!r} is there twice in one object; remove one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: malformed JSON: {error.msg} at column {error.colno}: {_excerpt(line)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: every line must be a JSON object, this one is {_excerpt(line)}")
    return value


class _TwiceNamed(Exception):
    """A key that one JSON object has twice: json.loads would take the last one without a word."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceNamed(next(name for name in names if names.count(name) > 1))
    return found


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 60 else text[:57] + "..."
