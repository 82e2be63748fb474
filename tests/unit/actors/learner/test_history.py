"""What a learner records about its groups is what a later reader finds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import History, HistoryReader, read
from asyncrl.config import record as config_record
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import DAMAGED, present
from tests import ROOT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "history.jsonl"


def test_a_line_is_read_as_it_was_written(path: Path) -> None:
    history = History(path, incarnation=2)
    history.begin(step=4, kept=0, max_staleness=3, settings={"run": {"name": "a"}})
    position = history.position
    history.record_trained([7, 5], step=5, max_staleness=1)
    history.record_lost("failed", [6], step=5)
    begun, trained, failed = read(path)
    assert (begun.kind, begun.incarnation, begun.step, begun.max_staleness) == ("begun", 2, 4, 3)
    assert begun.settings == {"run": {"name": "a"}}
    assert (trained.groups, trained.step, trained.max_staleness, trained.position) == ((7, 5), 5, 1, position)
    assert (failed.kind, failed.groups) == ("failed", (6,))
    history.close()


def test_a_resumed_learner_keeps_what_its_checkpoint_had(path: Path) -> None:
    first = History(path, incarnation=0)
    first.begin(step=0, kept=0, max_staleness=3, settings={})
    first.record_trained([0], step=1, max_staleness=0)
    kept = first.position
    first.record_trained([1], step=2, max_staleness=0)
    first.close()
    second = History(path, incarnation=1)
    assert second.position > kept
    second.begin(step=1, kept=kept, max_staleness=3, settings={})
    second.record_trained([2], step=2, max_staleness=0)
    second.close()
    assert [(entry.step, entry.groups) for entry in present(read(path)) if entry.kind == "trained"] == [
        (1, (0,)),
        (2, (2,)),
    ]


def test_a_line_that_was_cut_short_is_none_and_the_next_writer_removes_it(path: Path) -> None:
    history = History(path, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=3, settings={})
    length = history.position
    history.record_trained([0], step=1, max_staleness=0)
    history.close()
    os.truncate(path, length + 20)
    assert [entry.kind for entry in read(path)] == ["begun"]
    again = History(path, incarnation=1)
    assert again.position == length
    again.record_lost("dropped", [3], step=0)
    again.close()
    assert [entry.kind for entry in read(path)] == ["begun", "dropped"]


def test_a_history_that_grows_is_read_line_by_line(path: Path) -> None:
    history = History(path, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=3, settings={})
    length, reader = history.position, HistoryReader(path)
    before = reader.read()
    history.record_trained([0], step=1, max_staleness=0)
    history.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert reader.read() == before  # the line is not complete
    path.write_bytes(b" " * length + whole[length:])  # what was read is not read again
    assert [entry.kind for entry in reader.read()] == ["begun", "trained"]
    path.write_bytes(whole)
    assert reader.read() == read(path)


def test_a_folder_without_a_run_gets_one_line_and_a_foreign_file_is_a_damaged_one(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(history.jsonl is not there\)"):
        read(tmp_path / "history.jsonl")
    (tmp_path / "run.toml").touch()
    with pytest.raises(ConfigError, match="run.toml: is a file; give the run's folder"):
        read(tmp_path / "run.toml" / "history.jsonl")
    path.parent.mkdir()
    path.write_text('{"kind": "begun"}\n')
    (entry,) = read(path)
    assert (entry.kind, entry.position) == (DAMAGED, 0)
    assert entry.problem.startswith("line 1 cannot be read: ")


@pytest.mark.parametrize("bit", range(8))
def test_any_bit_that_changed_makes_one_line_a_damaged_one(path: Path, bit: int) -> None:
    history = History(path, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=3, settings={})
    for step in range(1, 6):
        history.record_trained([10 * step, 10 * step + 1], step=step, max_staleness=0)
    history.close()
    whole, data = read(path), path.read_bytes()
    start, end = whole[3].position, whole[4].position
    for at in range(start, end - 1):
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        found = read(path)
        good = [entry for entry in found if entry.kind != DAMAGED]
        assert good == [*whole[:3], *whole[4:]]
        assert len(found) - len(good) == 1 + (changed[at] == ord("\n"))


@pytest.mark.parametrize("left", [0, 1, 150])
def test_positions_mean_the_same_behind_a_cut(path: Path, left: int) -> None:
    """A resumed learner pads the missing part of the file, so later checkpoints have correct positions."""
    first = History(path, incarnation=0)
    first.begin(step=0, kept=0, max_staleness=3, settings={})
    for step in range(1, 9):
        first.record_trained([step], step=step, max_staleness=0)
    kept = first.position
    first.close()
    os.truncate(path, left)
    second = History(path, incarnation=1)
    second.begin(step=8, kept=kept, max_staleness=3, settings={})
    second.close()
    *before, gone, begun = read(path)
    assert (gone.kind, begun.kind, begun.position, begun.kept) == (DAMAGED, "begun", kept, kept)
    assert len(before) == (left == 150)
    assert "bytes were gone when the learner was resumed" in gone.problem


def test_settings_come_back_as_they_were_with_absolute_paths_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = config.load(
        ROOT / "examples" / "demo.toml",
        ["bus.token=hunter2", "bus.url=nats://me:hunter2@far:4222", "algorithm.options={clip_low=0.1}", "run.steps=7"],
    )
    monkeypatch.chdir(tmp_path)
    table = config_record.as_table(run)
    assert "hunter2" not in str(table)
    back = config_record.from_table(table, where="history")
    assert back.bus.url == "nats://far:4222"
    assert back.model.path == str(tmp_path / run.model.path)
    for section in ("run", "rollout", "learner", "algorithm", "staleness", "checkpoint", "critic", "reference"):
        assert getattr(back, section) == getattr(run, section), section
    assert dataclasses.replace(back.model, path=run.model.path) == run.model
