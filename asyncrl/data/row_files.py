"""Access rows of a JSONL or Parquet file by number, without keeping the parsed file in memory.

A JSONL file takes sixteen bytes of memory per row, for the offset and number of each line. Every line is parsed once at
open, so that a malformed line is found before the run starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from asyncrl.errors import ConfigError

Check = Callable[[dict[str, Any], str], None]
"""Checks one row; the string is its location. Raises ConfigError."""


class Rows(Protocol):
    """Rows of a file, numbered from 0."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """Return the file and line of a row, for errors."""
        ...


def open_rows(spec: str | Path, *, check: Check) -> Rows:
    """Open the rows of a file, or a slice "FILE[a:b]", and call ``check`` once for each.

    Raises ConfigError if the data cannot be used.
    """
    path, part = require_data(str(spec))
    rows = _open(path)
    chosen = range(len(rows))[part]
    if not len(rows):
        raise ConfigError(f"{path}: has no rows")
    if not len(chosen):
        raise ConfigError(f"{spec}: takes none of the {len(rows)} rows")
    for index in chosen:
        check(rows.row(index), rows.where(index))
    return rows if len(chosen) == len(rows) else SlicedRows(rows, chosen)


def require_data(spec: str) -> tuple[Path, slice]:
    """Return the path of the data and the slice of its rows. Raises ConfigError if the data does not exist."""
    path, part = path_and_slice(spec)
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name one file in it")
    if not path.exists():
        raise ConfigError(f"{path}: no such data file; it must be a .jsonl or .parquet file")
    return path, part


def path_and_slice(spec: str) -> tuple[Path, slice]:
    """Split "FILE[a:b]" into path and slice. If a file has exactly this name, return that file."""
    found = None if Path(spec).exists() else _SLICE.fullmatch(spec)
    if found is None:
        return Path(spec), slice(None)
    return Path(found[1]), slice(*(int(number) if number else None for number in found.groups()[1:]))


_SLICE: Final = re.compile(r"(.+?)@?\[(-?\d+)?:(-?\d+)?\]")


def _open(path: Path) -> Rows:
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonlRows(path)
    if path.suffix == ".parquet":
        return ParquetRows(path)
    raise ConfigError(f"{path}: data must be .jsonl (one JSON object a line) or .parquet, not {path.suffix!r}")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises ConfigError."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


class SlicedRows:
    """A slice of another object's rows."""

    def __init__(self, rows: Rows, chosen: range) -> None:
        self._rows, self._chosen = rows, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows.row(self._chosen[index])

    def where(self, index: int) -> str:
        return self._rows.where(self._chosen[index])


class JsonlRows:
    """A file with one JSON object per line, UTF-8. Blank lines are skipped. Several threads may read rows at once.

    The file stays open, so that the rows stay those that were checked if another file takes its name, or none does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        self._sizes = array("q")
        self._lines = array("q")
        try:
            self._stream = path.open("rb")
            weakref.finalize(self, self._stream.close)
            offset = 0
            for number, line in enumerate(self._stream, start=1):
                if line.removeprefix(BOM_UTF8).strip():
                    self._offsets.append(offset)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                offset += len(line)
        except OSError as error:
            raise self._unreadable(error) from None

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> dict[str, Any]:
        try:
            line = os.pread(self._stream.fileno(), self._sizes[index], self._offsets[index])
        except OSError as error:
            raise self._unreadable(error) from None
        if index == 0 and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            raise ConfigError(
                f"{self.where(index)}: begins a JSON array, and this must be one JSON object a line: "
                "`jq -c '.[]' OLD > NEW.jsonl` makes that of an array"
            )
        return _parse(line, self.where(index))

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self._path}: cannot be read: {error.strerror}")


class ParquetRows:
    """A Parquet file as an Arrow table, memory-mapped or compact in memory. Rows are converted to Python on access."""

    def __init__(self, path: Path) -> None:
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

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, Any]:
        return _restore_lists({name: self._table.column(name)[index].as_py() for name in self._table.column_names})

    def where(self, index: int) -> str:
        return f"{self._path} row {index + 1}"


def _restore_lists(row: dict[str, Any]) -> dict[str, Any]:
    """Return an Arrow row with its lists as they were written.

    Messages and tools are lists of structs. Arrow gives each struct the keys of all others, with null for missing
    values, and the chat template would show these to the model. Only the content of a message with tool calls may be
    null itself.
    """
    return {name: _drop_nulls(value) if isinstance(value, list) else value for name, value in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        is_message = isinstance(value.get("role"), str)
        return {
            name: _drop_nulls(item)
            for name, item in value.items()
            if item is not None or (is_message and name == "content")
        }
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip(b"\r\n").removeprefix(BOM_UTF8))  # behind a newline json counts columns anew
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}: {_excerpt(line)}"
        ) from None
    except ValueError:  # Python refuses integers with too many digits
        raise ConfigError(f"{where}: a whole number has more than 64 bits; no message can carry it") from None
    except RecursionError:
        raise ConfigError(f"{where}: lists and objects are nested too deep to be read: {_excerpt(line)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: every line must be a JSON object, this one is {_excerpt(line)}")
    return value


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 60 else text[:57] + "..."
