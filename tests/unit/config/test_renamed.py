"""Renamed keys of the run file: a user is told the new key; recorded settings are translated."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.config import RunConfig, record
from asyncrl.config.renamed import RENAMED, translated
from asyncrl.errors import ConfigError
from asyncrl.messages.codec import decode
from asyncrl.messages.fleet import RunSettings
from asyncrl.state import history
from tests import ROOT

NEEDED = {"model": {"path": "m"}, "data": {"path": "d"}}


def keys() -> dict[str, Any]:
    """Every section.key of the run file."""
    made = RunConfig(model=config.ModelSection(path="m"), data=config.DataSection(path="d"))
    sections = {name: getattr(made, name) for name in RunConfig.__dataclass_fields__}
    return {
        f"{name}.{field.name}": getattr(section, field.name)
        for name, section in sections.items()
        if section is not None
        for field in dataclasses.fields(section)
    }


def test_an_old_name_is_no_key_any_more_and_its_new_one_is() -> None:
    present = keys()
    for old, new in RENAMED.items():
        assert old not in present, old
        assert ".".join(new.split(".")[:2]) in present, new


def test_an_old_key_is_refused_in_one_line_that_says_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[data]\npath = "d"\n[rollout]\nsalvage_seconds = 1.0\n')
    with pytest.raises(ConfigError) as refused:
        config.load(path)
    assert str(refused.value) == f"{path}: rollout.salvage_seconds is now rollout.partial_save_seconds"


def test_an_old_key_after_set_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="^--set: rollout.salvage_seconds is now rollout.partial_save_seconds$"):
        config.only_overrides(["rollout.salvage_seconds=1.0"])


def test_recorded_settings_are_translated_and_what_was_given_is_not_changed() -> None:
    old = {"rollout": {"salvage_seconds": 1.5, "workers": 2}}
    assert translated(old) == {"rollout": {"partial_save_seconds": 1.5, "workers": 2}}
    assert old == {"rollout": {"salvage_seconds": 1.5, "workers": 2}}


@pytest.mark.parametrize(
    ("channel", "options"),
    [
        ("files", {}),
        ("nccl", {"host": "a", "bucket_megabytes": 512}),
        ("objects", {"full_every": 8, "delta_share": 0.25}),
    ],
)
def test_recorded_options_of_other_channels_are_left_out(channel: str, options: dict[str, Any]) -> None:
    """Older versions recorded every key with its value, for every channel."""
    old = {"channel": channel, "host": "a", "bucket_megabytes": 512, "full_every": 8, "delta_share": 0.25, "keep": 3}
    made = translated({"weights": old})["weights"]
    assert made.pop("options", {}) == options
    assert made == {"channel": channel, "keep": 3}


def test_the_settings_that_an_old_learner_left_on_the_bus_make_a_run() -> None:
    left = [json.loads(line) for line in (ROOT / "tests/data/v1/bus.jsonl").read_text().splitlines()]
    (settings,) = (base64.b64decode(line["data"]) for line in left if line["topic"] == "settings")
    run = record.from_table(decode(settings, RunSettings).sections, where="settings")
    assert run.rollout.partial_save_seconds == 1.0
    assert run.weights.channel == "files" and run.weights.options == {}


def test_translated_settings_stay_as_they_are() -> None:
    new = {"rollout": {"partial_save_seconds": 2.0}}
    assert translated(new) == new
    assert translated({"rollout": {"salvage_seconds": 1.0, "partial_save_seconds": 2.0}}) == new


def test_the_settings_that_an_old_run_recorded_make_a_run() -> None:
    begun = [entry for entry in history.read(ROOT / "tests/data/v1/history.jsonl") if entry.kind == "begun"]
    runs = [record.from_table(entry.settings, where="history") for entry in begun]
    assert [(run.rollout.partial_save_seconds, run.learner.groups_per_batch) for run in runs] == [(1.0, 2)] * 2
