"""Sources of rows: slices, several files, mixtures by weight, and a user's own source."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import config
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.row_files import open_rows
from asyncrl.data.sources import digests
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError


def write(path: Path, prefix: str, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{prefix}{i}", "label": i}) + "\n" for i in range(count)))
    return str(path)


def opened(seed: int = 0, **data: Any) -> PromptDataset:
    return PromptDataset.open(config.DataSection(**data), tokenizer=make_tokenizer(), seed=seed)


def prompts(dataset: PromptDataset, first: int, last: int) -> list[str]:
    return [row.prompt for position in range(first, last) if (row := dataset.at(position)) is not None]


@pytest.mark.parametrize(
    ("part", "expected"),
    [("[2:4]", [2, 3]), ("@[:2]", [0, 1]), ("[-2:]", [3, 4]), ("[:]", [0, 1, 2, 3, 4]), ("[3:99]", [3, 4])],
)
def test_a_slice_takes_these_rows(tmp_path: Path, part: str, expected: list[int]) -> None:
    dataset = opened(path=write(tmp_path / "a.jsonl", "n", 5) + part, shuffle=False, epochs=1)
    assert prompts(dataset, 0, 9) == [f"n{i}" for i in expected]
    assert dataset.num_rows == len(expected)


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_say_what_share_of_an_epoch_each_file_has(tmp_path: Path, shuffle: bool) -> None:
    """3 : 1 of 20 rows: 15 from the small file, each of its 4 rows 3 or 4 times, and 5 of the large file's 16 rows."""
    files = (
        config.DataFile(path=write(tmp_path / "a.jsonl", "a", 4), weight=3.0),
        config.DataFile(path=write(tmp_path / "b.jsonl", "b", 16), weight=1.0),
    )
    dataset = opened(files=files, shuffle=shuffle)
    epochs = [prompts(dataset, 20 * n, 20 * n + 20) for n in range(4)]
    for epoch in epochs:
        assert Counter(prompt[0] for prompt in epoch) == {"a": 15, "b": 5}
    drawn = Counter(prompt for epoch in epochs for prompt in epoch)
    assert {drawn[f"a{i}"] for i in range(4)} == {15}
    assert {drawn[f"b{i}"] for i in range(16)} == {1, 2}  # 20 draws of 16 rows: all come before any repeats
    assert [prompts(opened(files=files, shuffle=shuffle), p, p + 1) for p in (33, 7, 61)] == [
        [epochs[1][13]],
        [epochs[0][7]],
        [epochs[3][1]],
    ]
    if not shuffle:  # evenly spread
        assert "bb" not in "".join(prompt[0] for prompt in epochs[0])


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_by_epoch_are_a_curriculum_whose_last_epoch_stays(tmp_path: Path, shuffle: bool) -> None:
    """Of 8 rows an epoch has 8, 0, then 6, 2, then 2, 6. No row repeats before all rows of its file were used."""
    files = (
        config.DataFile(path=write(tmp_path / "a.jsonl", "a", 4), weights=(1.0, 3.0, 1.0)),
        config.DataFile(path=write(tmp_path / "b.jsonl", "b", 4), weights=(0.0, 1.0, 3.0)),
    )
    dataset = opened(files=files, shuffle=shuffle)
    epochs = [prompts(dataset, 8 * n, 8 * n + 8) for n in range(4)]
    assert [sum(prompt[0] == "a" for prompt in epoch) for epoch in epochs] == [8, 6, 2, 2]
    assert prompts(opened(files=files, shuffle=shuffle), 26, 28) == epochs[3][2:4]
    for file, count in (("a", 18), ("b", 14)):
        drawn = [prompt for epoch in epochs for prompt in epoch if prompt[0] == file]
        assert len(drawn) == count
        assert all(len(set(drawn[n : n + 4])) == len(drawn[n : n + 4]) for n in range(0, count, 4))


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([{"weight": 1.0, "weights": (1.0,)}], "weight and weights are both there"),
        ([{"weights": (0.0, 0.0)}], "weights must be >= 0, and one of them above 0"),
        ([{"weights": (1.0, 0.0)}, {"weights": (1.0, 0.0, 1.0)}], "all weights of epoch 1 are 0"),
        ([{"weights": (1.0,)}, {}], "some of files have a weight"),
    ],
)
def test_weights_by_epoch_that_make_no_order_are_refused(weights: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config.DataSection(files=tuple(config.DataFile(path="a.jsonl", **each) for each in weights))


def test_the_digest_of_data_changes_with_the_contents_of_its_files_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "a", 3)
    data = config.DataSection(path=f"{path}[1:]")
    before = digests(data)
    assert list(before) == [path]
    write(Path(path), "a", 3)
    assert digests(data) == before
    write(Path(path), "a", 4)
    assert not set(digests(data).values()) & set(before.values())
    assert digests(config.DataSection(source=SQUARES)) == {}


def test_one_file_is_in_the_order_that_old_checkpoints_count_in(tmp_path: Path) -> None:
    """The expected numbers come from the code before it supported several files."""
    dataset = opened(path=write(tmp_path / "a.jsonl", "n", 7), seed=3)
    old = np.argsort(np.random.PCG64(np.random.SeedSequence([3, 1])).random_raw(7), kind="stable")
    assert prompts(dataset, 7, 14) == [f"n{i}" for i in old]


class Squares:
    """The data.source of these tests."""

    def __init__(self, end: int = 5) -> None:
        self._end = end

    def at(self, position: int) -> dict[str, Any] | None:
        if position == 3:
            return {"prompt": "", "label": 3}
        return {"prompt": f"{position}*{position}", "label": str(position**2)} if position < self._end else None


class Raising:
    def at(self, position: int) -> Any:
        raise KeyError("no such shard")


class Nothing:
    pass


SQUARES = "tests.unit.data.test_sources:Squares"


def test_a_source_of_ones_own_gives_rows_by_position() -> None:
    dataset = opened(source=SQUARES)
    row = dataset.at(2)
    assert row is not None and (row.prompt, row.label, row.epoch) == ("2*2", "4", 0)
    assert dataset.at(5) is None
    assert dataset.num_rows == 0
    with pytest.raises(ConfigError, match=r"Squares' at\(3\): 'prompt' is empty"):
        dataset.check_first_rows()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("tests.unit.data.test_sources:Raising", r"at\(0\) raised KeyError: 'no such shard'"),
        ("tests.unit.data.test_sources:Nothing", r"must have at\(self, position\)"),
        ("tests.unit.data.test_sources:write", "is a function, not a type"),
        ("no_such_module:X", "cannot import 'no_such_module'"),
    ],
)
def test_bad_source_is_refused_in_one_line(source: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        opened(source=source).check_first_rows()
    assert "\n" not in str(caught.value)


def accept(row: dict[str, Any], where: str) -> None:
    """Check nothing."""


def write_rows(path: Path, name: str) -> Path:
    path.write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(3)))
    return path


def test_rows_stay_those_that_were_checked_when_the_file_is_removed_or_replaced(tmp_path: Path) -> None:
    rows = open_rows(write_rows(tmp_path / "data.jsonl", "old"), check=accept)
    write_rows(tmp_path / "new.jsonl", "other").rename(tmp_path / "data.jsonl")
    assert rows.row(1) == {"prompt": "old1"}
    (tmp_path / "data.jsonl").unlink()
    assert rows.row(2) == {"prompt": "old2"}


def stale(*_: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("failing", [(Path, "open"), (os, "pread")], ids=["when opened", "later"])
def test_unreadable_data_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[Any, str]
) -> None:
    path = write_rows(tmp_path / "data.jsonl", "n")
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
