"""Rows of the run's data by position: one file, several files, a weighted mixture, or the user's own source.

The row at a position depends only on the files, the weights and the seed. A resumed run that stored its position
continues with the very next row. Tests: tests/unit/data/test_sources.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl import config
from asyncrl.config import plugins, tables
from asyncrl.config.data import weights_by_epoch
from asyncrl.data.row_files import Check, Rows, digest, open_rows, require_data
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A row, its location in the data, and the epoch.

    key  identifies the row; the same in every epoch
    """

    row: dict[str, Any]
    where: str
    epoch: int
    dataset: str
    key: tuple[int, int]


class Positions(Protocol):
    """The endless sequence that a run draws from."""

    @property
    def num_rows(self) -> int:
        """Positions per epoch; 0: unknown."""
        ...

    def at(self, position: int) -> Found | None:
        """Return the row at ``position``; None after the last one. Raises ConfigError."""
        ...


def open_positions(data: config.DataSection, *, seed: int, check: Check) -> Positions:
    """Open the data of the run file, and call ``check`` once for every row of its files. Raises ConfigError."""
    if data.source:
        return OwnSource(data, check=check)
    files = _files(data)
    rows = [open_rows(file.path, check=check) for file in files]
    names = [file.name or ("" if not data.files else Path(file.path).name) for file in files]
    weights = weights_by_epoch(files)
    order = _Order(data, seed=seed)
    return Mixture(rows, names, weights, order=order) if any(weights[0]) else Joined(rows, names, order=order)


def digests(data: config.DataSection) -> dict[str, str]:
    """Return the SHA-256 of each file by its absolute path; nothing for a user's own source. Raises ConfigError."""
    paths = set() if data.source else {require_data(file.path)[0].absolute() for file in _files(data)}
    return {str(path): digest(path) for path in sorted(paths)}


def _files(data: config.DataSection) -> tuple[config.DataFile, ...]:
    return data.files or (config.DataFile(path=data.path),)


class _Order:
    """The order of rows in each epoch, and the number of epochs."""

    def __init__(self, data: config.DataSection, *, seed: int) -> None:
        self.is_shuffled, self._epochs, self._seed = data.shuffle, data.epochs, seed
        self._known: dict[int, tuple[int, int, NDArray[np.int64]]] = {}

    def has_ended(self, epoch: int) -> bool:
        return bool(self._epochs) and epoch >= self._epochs

    def of(self, epoch: int, num_rows: int, *, file: int = 0) -> NDArray[np.int64]:
        """Return the order i64[num_rows]. It is cached until another epoch of the same file is requested."""
        if not self.is_shuffled:
            return np.arange(num_rows)
        known = self._known.get(file)
        if known is None or known[:2] != (epoch, num_rows):
            known = (epoch, num_rows, shuffle(num_rows, seed=self._seed, epoch=epoch, file=file))
            self._known[file] = known
        return known[2]


class Joined:
    """Several files in sequence, with every row once per epoch. Position p is row p mod n of epoch p // n."""

    def __init__(self, files: Sequence[Rows], names: Sequence[str], *, order: _Order) -> None:
        self._files, self._names, self._order = files, names, order
        self._ends = np.cumsum([len(rows) for rows in files])

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1])

    def at(self, position: int) -> Found | None:
        epoch, place = divmod(position, self.num_rows)
        if self._order.has_ended(epoch):
            return None
        index = int(self._order.of(epoch, self.num_rows)[place])
        file = int(np.searchsorted(self._ends, index, side="right"))
        return _find(self._files, self._names, file, index - int(self._ends[file]) + len(self._files[file]), epoch)


class Mixture:
    """A weighted mixture. Each epoch has as many rows as all files together; each file's share follows its weight.

    Each file's rows come in their own order, and all of them come before any repeats. If a file's share is larger than
    its number of rows, some rows come several times per epoch. If it is smaller, the rest comes in the next epoch.

    Raises ConfigError for a file whose share of an epoch is not even one row, because it would never be drawn.
    """

    def __init__(
        self, files: Sequence[Rows], names: Sequence[str], weights: Sequence[Sequence[float]], *, order: _Order
    ) -> None:
        """weights: [epochs][files]; the last ones stay"""
        self._files, self._names, self._order = files, names, order
        total = sum(len(rows) for rows in files)
        self._counts = np.array([shares(each, total) for each in weights])  # i64[epochs, files]
        for each, counts in zip(weights, self._counts, strict=True):
            for name, weight, count in zip(names, each, counts, strict=True):
                if weight and not count:
                    least = (sum(each) - weight) / (total - 1)
                    raise ConfigError(
                        f"data.files: {name}: its share (weight = {weight:g}) is less than one of an epoch's {total:,} "
                        f"rows, so it would never be drawn; raise the weight to {least:.3g}, or remove the file"
                    )
        self._pattern: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    @property
    def num_rows(self) -> int:
        return int(self._counts[0].sum())

    def _counts_of(self, epoch: int) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = self._counts[min(epoch, len(self._counts) - 1)]
        return counts

    def _num_before(self, epoch: int, file: int) -> int:
        """Return how many rows of a file come in all epochs before this one."""
        given = self._counts[:epoch, file]
        return int(given.sum()) + (epoch - len(given)) * int(self._counts[-1, file])

    def at(self, position: int) -> Found | None:
        epoch, place = divmod(position, self.num_rows)
        if self._order.has_ended(epoch):
            return None
        file_of, number_of = self._epoch(epoch)
        file = int(file_of[place])
        passed, index = divmod(self._num_before(epoch, file) + int(number_of[place]), len(self._files[file]))
        index = int(self._order.of(passed, len(self._files[file]), file=file + 1)[index])
        return _find(self._files, self._names, file, index, epoch)

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each place of the epoch: the file, and how many rows of that file come before it."""
        if self._pattern is None or self._pattern[0] != epoch:
            # Evenly spread: the k-th of n rows of a file is due at (k + 1/2) / n of the epoch.
            counts = self._counts_of(epoch)
            due = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
            files = np.repeat(np.arange(len(counts)), counts)
            is_shuffled = self._order.is_shuffled
            file_of = files[self._order.of(epoch, len(files)) if is_shuffled else np.argsort(due, kind="stable")]
            number_of = np.zeros(len(files), np.int64)
            for file in range(len(counts)):
                mine = file_of == file
                number_of[mine] = np.arange(np.count_nonzero(mine))
            self._pattern = (epoch, file_of, number_of)
        return self._pattern[1], self._pattern[2]


class OwnSource:
    """The user's own class; see DataSource in data/port.py. Each row is checked when it is requested."""

    num_rows = 0

    def __init__(self, data: config.DataSection, *, check: Check) -> None:
        self._name, self._check = data.source, check
        self._source = make_source(data)

    def at(self, position: int) -> Found | None:
        where = f"data.source: {self._name!r} at({position})"
        try:
            with plugins.contain_exits():
                row = self._source.at(position)
        except Exception as error:  # user code may raise anything
            raise ConfigError(f"{where} raised {plugins.describe_raised(error)}") from error
        if row is None:
            return None
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{where} gave {plugins.with_article(type(row))}, not a table of columns, or None at the end"
            )
        made = dict(row)
        self._check(made, where)
        return Found(row=made, where=where, epoch=0, dataset="", key=(-1, position))


def make_source(data: config.DataSection) -> Any:
    """Create the object of data.source. Raises ConfigError."""
    kind = plugins.load(data.source, where="data.source", kind=type)
    options_type = getattr(kind, "Options", None)
    if options_type is None and data.options:
        raise ConfigError(f"data.options: {data.source!r} has no Options, got {', '.join(data.options)}")
    arguments = () if options_type is None else (tables.build(options_type, data.options, "data.options"),)
    made = plugins.make(kind, *arguments, where="data.source", name=data.source)
    if not callable(getattr(made, "at", None)):
        raise ConfigError(
            f"data.source: {data.source!r} must have at(self, position), see asyncrl.data.port.DataSource"
        )
    return made


def _find(files: Sequence[Rows], names: Sequence[str], file: int, index: int, epoch: int) -> Found:
    rows = files[file]
    return Found(row=rows.row(index), where=rows.where(index), epoch=epoch, dataset=names[file], key=(file, index))


def shares(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Divide ``total`` places by weight, i64[F]: integer parts first, then one for each of the largest remainders."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    for file in np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]:
        counts[file] += 1
    return counts


def shuffle(num_rows: int, *, seed: int, epoch: int, file: int = 0) -> NDArray[np.int64]:
    """Return the order of one epoch, a permutation i64[num_rows] that is the same on every machine and numpy version.

    numpy guarantees the raw stream of PCG64, but not the result of Generator.permutation, so we sort the raw numbers.
    """
    entropy = [seed & 0xFFFFFFFFFFFFFFFF, epoch, *([file] if file else [])]
    numbers = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
    return np.argsort(numbers, kind="stable")
