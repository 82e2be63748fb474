"""What a learner writes down about its groups is what a later reader finds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.config import record as config_record
from asyncrl.errors import ConfigError
from asyncrl.history import History, read
from asyncrl.policies.accounting import present


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "history.jsonl"


def test_a_line_is_read_as_it_was_written(path: Path) -> None:
    history = History(path, run_epoch=2)
    history.begin(step=4, kept=0, max_staleness=3, settings={"run": {"name": "a"}})
    position = history.position
    history.trained([7, 5], step=5, max_staleness=1)
    history.lost("buried", [6], step=5)
    begun, trained, buried = read(path)
    assert (begun.kind, begun.run_epoch, begun.step, begun.max_staleness) == ("begun", 2, 4, 3)
    assert begun.settings == {"run": {"name": "a"}}
    assert (trained.groups, trained.step, trained.max_staleness, trained.position) == ((7, 5), 5, 1, position)
    assert (buried.kind, buried.groups) == ("buried", (6,))
    history.close()


def test_a_resumed_learner_keeps_what_its_checkpoint_had(path: Path) -> None:
    first = History(path, run_epoch=0)
    first.begin(step=0, kept=0, max_staleness=3, settings={})
    first.trained([0], step=1, max_staleness=0)
    kept = first.position
    first.trained([1], step=2, max_staleness=0)
    first.close()
    second = History(path, run_epoch=1)
    assert second.position > kept
    second.begin(step=1, kept=kept, max_staleness=3, settings={})
    second.trained([2], step=2, max_staleness=0)
    second.close()
    assert [(entry.step, entry.groups) for entry in present(read(path)) if entry.kind == "trained"] == [
        (1, (0,)),
        (2, (2,)),
    ]


def test_a_line_that_was_cut_short_is_none_and_the_next_writer_removes_it(path: Path) -> None:
    history = History(path, run_epoch=0)
    history.begin(step=0, kept=0, max_staleness=3, settings={})
    length = history.position
    history.trained([0], step=1, max_staleness=0)
    history.close()
    os.truncate(path, length + 20)
    assert [entry.kind for entry in read(path)] == ["begun"]
    again = History(path, run_epoch=1)
    assert again.position == length
    again.lost("dropped", [3], step=0)
    again.close()
    assert [entry.kind for entry in read(path)] == ["begun", "dropped"]


def test_a_folder_without_a_run_and_a_foreign_file_get_one_line(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(history.jsonl is not there\)"):
        read(tmp_path / "history.jsonl")
    path.parent.mkdir()
    path.write_text('{"kind": "begun"}\n')
    with pytest.raises(ConfigError, match="line 1 is not one of a history"):
        read(path)


def test_settings_come_back_as_they_were_with_absolute_paths_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = config.load(
        Path(__file__).parent.parent / "examples" / "demo.toml",
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
